"""Where the memory of a run went: by layer, over a step, and what was predicted of it."""

from collections.abc import Sequence

import numpy as np

from fnet.memory import format_bytes
from fnet.memory.remat import REMAT_POLICIES
from train.output.report.charts import Line, chart
from train.output.report.html import Html, element
from train.output.report.runs import Memory, Run
from train.output.report.scales import BYTES, axis, steps_axis
from train.output.report.tables import bars, section, side_by_side

_MOST_LAYERS = 40
_MOST_POINTS = 400


def memory(runs: Sequence[Run]) -> Html:
    """The section; runs of the same step share what is shown of it."""
    there = [run for run in runs if run.memory]
    missing = [run.label for run in runs if not run.memory]
    absent = None
    if missing:
        of = f" of {', '.join(missing)}" if len(runs) > 1 else ""
        absent = element(
            "p",
            f"No memory.json{of} was read: it is written once the train step is compiled.",
            class_="muted",
        )
    steps: dict[Memory, list[Run]] = {}
    for run in there:
        assert run.memory is not None
        steps.setdefault(run.memory, []).append(run)
    most_kept = max((k.bytes for m in steps for k in m.kept), default=1)
    most_alive = max((_peak_bytes(m) for m in steps), default=1)
    drawn = []
    for i, (found, of_runs) in enumerate(steps.items()):
        inside = _step(found, most_kept, most_alive)
        if len(steps) > 1:
            head = element("summary", ", ".join(run.label for run in of_runs))
            inside = element("details", head, inside, open=i < 2)
        drawn.append(inside)
    return section(
        "memory",
        "Memory",
        absent,
        _predicted_and_seen(runs),
        element("p", "Below, all runs are drawn to the same scale.", class_="muted")
        if len(steps) > 1
        else None,
        drawn,
        _sums(runs) if there else None,
    )


def _peak_bytes(m: Memory) -> int:
    return max(m.live_bytes or (0,), default=0) or m.peak.total


def _predicted_and_seen(runs: Sequence[Run]) -> Html | None:
    rows = []
    for run in runs:
        s = run.summary
        if s is None or s.peak_bytes_predicted is None:
            continue
        amounts = {
            "predicted": s.peak_bytes_predicted,
            "seen": s.peak_bytes_seen,
            "budget": s.budget_bytes,
        }
        name = f"{run.label}: " if len(runs) > 1 else ""
        rows += [([name + n], b, format_bytes(b)) for n, b in amounts.items() if b is not None]
    if not rows:
        return None
    about = (
        "Predicted: the compiled train step, or evaluation where that holds more. Seen: the most "
        "in use above what was in use before training; on CPU of the whole process, with "
        "batches read ahead, checkpoints on their way to disk and what the allocator keeps"
    )
    return bars(["peak", "bytes"], rows, max(value for _, value, _ in rows), about, "c5")


def _step(m: Memory, most_kept: int, most_alive: int) -> Html:
    right = element("div", _timeline(m, most_alive), _largest(m))
    return element("div", element("div", _kept(m, most_kept)), right, class_="halves")


def _kept(m: Memory, most: int) -> Html:
    if not m.kept:
        return element("p", "The backward pass keeps nothing that is not there anyway.")
    rows = [((k.layer, f"{k.arrays:,}"), k.bytes, format_bytes(k.bytes)) for k in m.kept]
    total = sum(k.bytes for k in m.kept)
    of = " of a microbatch" if m.microbatches > 1 else ""
    caption = f"Kept for the backward pass{of}, {format_bytes(total)}: forward from top to bottom"
    if len(rows) > _MOST_LAYERS:
        rest = m.kept[_MOST_LAYERS:]
        arrays, amount = sum(k.arrays for k in rest), sum(k.bytes for k in rest)
        rows[_MOST_LAYERS:] = [
            ((f"{len(rest):,} more layers", f"{arrays:,}"), amount, format_bytes(amount))
        ]
        most = max(most, amount)
    return bars(["layer", "arrays", "bytes"], rows, most, caption)


def _timeline(m: Memory, most: int) -> Html:
    if not m.live_bytes:
        return element(
            "p",
            "The device's compiler does not tell what is alive when, so there is no such curve.",
            class_="muted",
        )
    live = np.array(m.live_bytes, np.float64)
    parts = min(len(live), _MOST_POINTS)
    first = np.arange(parts) * len(live) // parts
    last = np.append(first[1:], len(live)) - 1
    alive = np.maximum.reduceat(live, first)
    # The curve stands where the most of each part does.
    where = [
        f"{a:,}" if a == b else f"{a:,} to {b:,}"
        for a, b in zip(first.tolist(), last.tolist(), strict=True)
    ]
    line = Line(
        item="alive",
        style="c0",
        x=(first + last) / 2,
        y=alive,
        where=where,
        words=[format_bytes(int(b)) for b in alive],
        last=f"{format_bytes(int(alive.max()))} at most",
    )
    assigned = m.peak.total - m.peak.workspace
    upward = axis(BYTES, 0, max(most, assigned))
    thin = len(live) // parts
    about = "along its instructions"
    about += f"; each point: the most of about {thin}" if thin > 1 else ""
    return chart(
        "alive while the compiled step runs",
        about,
        [line],
        ("instruction", steps_axis(0, max(len(live) - 1, 1))),
        upward,
        at=f"instruction {int(live.argmax()):,} of {len(live):,}",
        group=f"alive{len(live)}",
        area=True,
        marks=[(f"assigned by the compiler: {format_bytes(assigned)}", assigned)],
    )


def _largest(m: Memory) -> Html | None:
    if not m.largest_at_peak:
        return None
    rows = [
        (
            (
                b.layer or b.instruction,
                (b.phase or b.kind) if b.kind == "temporary" else b.kind,
                f"{b.dtype}[{','.join(map(str, b.shape))}]",
            ),
            b.bytes,
            format_bytes(b.bytes),
        )
        for b in m.largest_at_peak
    ]
    longest = max(b.bytes for b in m.largest_at_peak)
    return bars(
        ["layer", "of", "array", "bytes"],
        rows,
        longest,
        "The largest buffers where the step holds most",
    )


def _sums(runs: Sequence[Run]) -> Html:
    def of(read: object) -> list[str | None]:
        assert callable(read)
        return [read(run.memory) if run.memory else None for run in runs]

    rows = [
        ("parameters", of(lambda m: f"{m.parameters:,}")),
        ("train state", of(lambda m: format_bytes(m.state_bytes))),
        ("of it renewed in place", of(lambda m: format_bytes(m.peak.aliased))),
        ("arguments (state and batch)", of(lambda m: format_bytes(m.peak.arguments))),
        ("temporaries", of(lambda m: format_bytes(m.peak.temporaries))),
        ("for convolutions (estimate)", of(lambda m: format_bytes(m.peak.workspace))),
        ("peak of the train step", of(lambda m: format_bytes(m.peak.total))),
        ("policy", of(lambda m: _policy(m.policy))),
        ("microbatches", of(lambda m: f"{m.microbatches:,}")),
    ]
    return side_by_side(rows, runs, "The compiled train step in sums", mark=True)


def _policy(name: str) -> str:
    return f"{name}: saves {REMAT_POLICIES[name].saves}" if name in REMAT_POLICIES else name
