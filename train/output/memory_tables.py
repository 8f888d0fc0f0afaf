"""Tables of where the memory goes, for a terminal."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table

from fnet.memory import Candidate, Plan, format_bytes
from fnet.memory.remat import REMAT_POLICIES
from train.run.account import Account


def tables(account: Account) -> Iterator[RenderableType]:
    """What there is to see of a compiled step: its sums, what it keeps, what is largest."""
    yield step_table(account)
    if account.kept:
        yield kept_table(account)
    if account.largest:
        yield largest_table(account)


def step_table(account: Account) -> Table:
    """The compiled step's memory in sums."""
    planned, report = account.planned, account.planned.executable.report
    t = _table("memory of the compiled step", header=False)
    t.add_column()
    t.add_column(justify="right", style="bold")
    t.add_row("parameters", f"{report.parameters:,}")
    t.add_row("train state", format_bytes(report.state_bytes))
    t.add_row("  of it renewed in place (aliased)", format_bytes(report.donation.aliased_bytes))
    t.add_row("arguments (state and batch)", format_bytes(report.peak.arguments))
    t.add_row("temporaries", format_bytes(report.peak.temporaries))
    if report.peak.workspace:
        t.add_row("for convolutions (estimate)", format_bytes(report.peak.workspace))
    t.add_row("peak", format_bytes(report.peak.total))
    saves = REMAT_POLICIES[planned.policy].saves
    t.add_row("policy", f"{planned.policy}: saves {saves}")
    if planned.proof:
        t.add_row("  arithmetic, compiled", f"{planned.proof.flops_ratio:.2f} of keeping all")
        t.add_row(
            "  temporaries, compiled", f"{planned.proof.temporaries_ratio:.2f} of keeping all"
        )
    if planned.microbatches > 1:
        t.add_row("microbatches", str(planned.microbatches))
    return t


def kept_table(account: Account) -> Table:
    """What the backward pass keeps of each layer, forward from top to bottom."""
    total = sum(layer.bytes for layer in account.kept)
    most = max(layer.bytes for layer in account.kept)
    t = _table(f"kept for the backward pass: {format_bytes(total)}")
    t.add_column("layer", overflow="fold")
    t.add_column("arrays", justify="right", no_wrap=True)
    t.add_column("bytes", justify="right", no_wrap=True)
    t.add_column("", no_wrap=True)
    for layer in account.kept:
        bar = "█" * round(20 * layer.bytes / most) if most else ""
        t.add_row(layer.layer, str(layer.arrays), format_bytes(layer.bytes), bar)
    return t


def largest_table(account: Account) -> Table:
    """The largest buffers alive when the compiled step holds most."""
    t = _table("largest at the peak")
    t.add_column("layer", overflow="fold")
    t.add_column("of", no_wrap=True)
    t.add_column("array", no_wrap=True)
    t.add_column("bytes", justify="right", no_wrap=True)
    for b in account.largest:
        shape = f"{b.dtype}[{','.join(map(str, b.shape))}]"
        of = (b.phase or b.kind) if b.kind == "temporary" else b.kind
        t.add_row(b.layer or b.instruction, of, shape, format_bytes(b.bytes))
    return t


def plan_table(plan: Plan, reserve: int) -> Table:
    """Every candidate, the fastest first, with what it takes and whether that fits."""
    least_work = min(c.cost.time for c in plan.candidates)
    t = _table("ways to train" + (f" within {format_bytes(plan.budget)}" if plan.budget else ""))
    # Folded where there is little room: of a number no digit is left out.
    t.add_column("policy", overflow="fold")
    for name in ("split", "peak", "GFLOP", "GB", "time"):
        t.add_column(name, justify="right", overflow="fold")
    t.add_column("scheduled", overflow="fold")
    t.add_column("", overflow="fold")
    for c in plan.candidates:
        fits = plan.budget is None or c.peak.total + reserve <= plan.budget
        mark = "chosen" if c is plan.chosen else "" if fits else "too large"
        t.add_row(
            c.policy,
            str(c.microbatches),
            format_bytes(c.peak.total),
            f"{c.cost.flops / 1e9:,.1f}",
            f"{c.cost.bytes / 1e9:,.1f}",
            f"{c.cost.time / least_work:.2f}",
            _scheduling(c),
            mark,
            style="bold" if c is plan.chosen else "" if fits else "dim",
        )
    t.caption = "split: microbatches; GFLOP, GB: a step's arithmetic and traffic; time: by both"
    t.caption_justify = "left"
    return t


def plan_words(plan: Plan, reserve: int) -> str:
    """What was chosen and what less would take, in words."""
    lines = []
    if reserve and plan.budget:
        lines.append(f"{format_bytes(reserve)} of the budget is left to the process itself.")
    if plan.smaller:
        need = format_bytes(plan.smaller.peak.total + (reserve if plan.budget else 0))
        slower = plan.smaller.cost.time / plan.chosen.cost.time - 1
        lines.append(f"The next smaller one: {plan.smaller}, {need}, about {slower:.0%} more time.")
    return "\n".join(lines)


def _scheduling(c: Candidate) -> str:
    return "for memory" if "xla_cpu_scheduler_type" in c.compiler_options else "as usual"


def _table(title: str, *, header: bool = True) -> Table:
    return Table(title=title, title_justify="left", show_header=header)
