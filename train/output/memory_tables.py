"""Memory of a compiled train step: the contents of memory.json, and its tables."""

import re
import statistics
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich import table as rich_table

from fnet.memory import Buffer, LayerResiduals, format_bytes
from train.output.tables import Table, to_rich
from train.stored import Count, Stored

if TYPE_CHECKING:
    from fnet.memory import Candidate, Plan

_MOST_LAYERS = 40
PHASES = {
    "forward": ", most in the forward pass",
    "backward": ", most in the backward pass",
    "optimizer": ", most in the optimizer update",
}
"""The end of a line about the memory of a step, by the phase of its peak."""


class StoredPeak(Stored):
    """Bytes of a compiled step, see `fnet.memory.Peak`."""

    arguments: Count
    outputs: Count
    aliased: Count
    temporaries: Count
    total: Count
    workspace: Count = 0
    constants: Count = 0


class StepMemory(Stored):
    """Contents of memory.json, as far as people look at them."""

    parameters: Count
    state_bytes: Count
    peak: StoredPeak
    policy: str
    saves: str | None = None
    microbatches: Count
    residuals: tuple[LayerResiduals, ...]
    temporaries_without_remat: Count | None = None
    largest_at_peak: tuple[Buffer, ...] = ()
    live_bytes: tuple[Count, ...] | None = None
    peak_phase: str = ""


def memory_tables(memory: StepMemory, devices: int = 1) -> Iterator[rich_table.Table]:
    """Render the memory of a compiled step for the terminal: sums, residuals, largest buffers."""
    title = "Memory of the compiled train step"
    if devices > 1:
        title += f" on each of {devices} devices"
    yield to_rich(Table(title, ("", ""), list(step_sums(memory).items())))
    for table in (residuals_table(memory), largest_table(memory)):
        if table.rows:
            yield to_rich(table)


def step_sums(memory: StepMemory) -> dict[str, str]:
    """Return the memory of a compiled step in sums, by name."""
    peak, policy = memory.peak, memory.policy
    saves = f": saves {memory.saves}" if memory.saves else ""
    sums = {
        "parameters": f"{memory.parameters:,}",
        "train state": format_bytes(memory.state_bytes),
        "updated in place (aliased)": format_bytes(peak.aliased),
        "arguments (state and batch)": format_bytes(peak.arguments),
        "temporaries": format_bytes(peak.temporaries),
    }
    if peak.workspace:
        sums["convolution workspace (estimate)"] = format_bytes(peak.workspace)
    if peak.constants:
        sums["constants (arrays in the program)"] = format_bytes(peak.constants)
    sums["peak of the train step"] = format_bytes(peak.total)
    sums["remat policy"] = f"{policy}{saves}"
    if before := memory.temporaries_without_remat:
        sums["temporaries relative to no remat"] = f"{peak.temporaries / before:.2f}"
    sums["microbatches"] = f"{memory.microbatches:,}"
    return sums


def describe_errors(errors: Mapping[str, float]) -> str:
    """Describe the relative errors of quantized weights by path."""
    worst = max(errors, key=lambda path: errors[path])
    median = statistics.median(errors.values())
    return f"relative error {median:.2%} (median), {errors[worst]:.2%} at most, in {worst}"


def residuals_table(memory: StepMemory, longest: int = 0) -> Table:
    """Return what each layer saves for the backward pass, in forward order.

    A full bar stands for ``longest`` bytes, or for the largest row if it is longer.
    """
    rows = [(r.layer, r.arrays, r.bytes) for r in memory.residuals]
    total = sum(size for _, _, size in rows)
    if rest := rows[_MOST_LAYERS:]:
        _, arrays, sizes = zip(*rest, strict=True)
        rows[_MOST_LAYERS:] = [(f"{len(rest):,} more layers", sum(arrays), sum(sizes))]
    longest = max([longest, 1, *(size for _, _, size in rows)])
    part = " of one microbatch" if memory.microbatches > 1 else ""
    return Table(
        f"Residuals{part} saved for the backward pass, in forward order: {format_bytes(total)}",
        ("layer", "arrays", "bytes"),
        [(layer, f"{arrays:,}", format_bytes(size)) for layer, arrays, size in rows],
        bars=[size / longest for _, _, size in rows],
    )


def largest_table(memory: StepMemory) -> Table:
    """Return the largest buffers that are alive at the peak of the compiled step."""
    buffers = memory.largest_at_peak
    longest = max([1, *(b.bytes for b in buffers)])
    return Table(
        "Largest buffers at the peak",
        ("layer", "kind", "array", "bytes"),
        [
            (
                # An argument's name as a path: state.params['a']['b'] -> params/a/b.
                re.sub(r"\['([^']*)'\]", r"/\1", b.layer).removeprefix("state.") or b.instruction,
                (b.phase or b.kind) if b.kind == "temporary" else b.kind,
                f"{b.dtype}[{','.join(map(str, b.shape))}]",
                format_bytes(b.bytes),
            )
            for b in buffers
        ],
        texts=3,
        bars=[b.bytes / longest for b in buffers],
    )


def plan_table(plan: "Plan", reserve: int) -> Table:
    """Return every candidate of a plan, the fastest first.

    ``reserve`` are the bytes that the process takes outside of the compiled step.
    """
    fastest = min(c.cost.time for c in plan.candidates)
    within = f" within {format_bytes(plan.budget)}" if plan.budget else ""

    def verdict(c: "Candidate") -> str:
        if c is plan.chosen:
            return "chosen"
        fits = plan.budget is None or c.peak.total + reserve <= plan.budget
        return "" if fits else "too large"

    return Table(
        f"Ways to train{within}",
        ("remat", "schedule", "micro-\nbatches", "chunks", "peak", "GFLOP", "GB", "time", ""),
        [
            (
                str(c.policy),
                _schedule(c),
                str(c.microbatches),
                str(c.policy.chunks),
                format_bytes(c.peak.total),
                f"{c.cost.flops / 1e9:,.1f}",
                f"{c.cost.bytes / 1e9:,.1f}",
                f"{c.cost.time / fastest:.2f}",
                verdict(c),
            )
            for c in plan.candidates
        ],
        texts=2,
        caption="GFLOP, GB: compute and memory traffic per step. Time: estimate from both.",
        styles=[{"chosen": "bold", "": ""}.get(verdict(c), "dim") for c in plan.candidates],
        is_wide=True,
    )


def describe_candidate(number: int, candidate: "Candidate", limit: int | None) -> str:
    """Return a line of progress: program ``number`` of a plan was compiled.

    ``limit`` are the bytes that the step may use, or None.
    """
    from fnet.memory.plan import MOST_PROGRAMS  # imports JAX

    count = f"{number}" if limit is None else f"{number} of about {MOST_PROGRAMS} programs"
    budget = "" if limit is None else f", budget {format_bytes(max(limit, 0))} for the step"
    peak = format_bytes(candidate.peak.total)
    return f"compiled {count}: {_way(candidate)}, peak {peak}{budget}"


def plan_summary(plan: "Plan", reserve: int) -> str:
    """Describe the choice of a plan, what it leaves to the process, and a smaller candidate."""
    chosen, smaller = plan.chosen, plan.smaller
    programs = len(plan.candidates)
    of = f", the fastest that fits of {programs:,} compiled programs" if programs > 1 else ""
    lines = [f"{_way(chosen)}{of}."]
    if reserve and plan.budget:
        lines.append(f"{format_bytes(reserve)} of the budget is reserved for the process itself.")
    if smaller:
        need = format_bytes(smaller.peak.total + (reserve if plan.budget else 0))
        slower = max(smaller.cost.time / chosen.cost.time - 1, 0)
        way, time = _way(smaller), f", about {slower:.0%} slower"
        if smaller.policy is chosen.policy and smaller.microbatches == chosen.microbatches:
            # The estimated time does not depend on the schedule.
            way, time = f"the same with XLA's {_schedule(smaller)} schedule", ""
        lines.append(f"Next smaller: {way}, {need}{time}.")
    return "\n".join(lines)


def _way(c: "Candidate") -> str:
    """Describe a candidate, including the XLA schedule on a CPU if it is not the default."""
    policy = {"none": "no", "planned": "planned"}.get(str(c.policy))
    parts = [f"{policy} rematerialization" if policy else f"remat policy {c.policy}"]
    if c.microbatches > 1:
        parts.append(f"{c.microbatches} microbatches")
    if c.policy.chunks > 1:
        parts.append(f"{c.policy.chunks} chunks")
    if _schedule(c) != "default":
        parts.append(f"{_schedule(c)} schedule")
    return ", ".join(parts)


def _schedule(c: "Candidate") -> str:
    return "min memory" if "xla_cpu_scheduler_type" in c.compiler_options else "default"
