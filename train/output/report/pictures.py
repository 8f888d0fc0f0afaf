"""Single examples: right and wrong, class by class, and those of steps that were left out."""

from collections.abc import Sequence

from train.config import Denoiser, LanguageModel
from train.output.report.curves import known
from train.output.report.html import Html, element
from train.output.report.runs import PICTURES, Run
from train.output.report.tables import below_each_other, section, texts

_MOST_CLASSES = 20
_MOST_BAD_STEPS = 20
_MOST_NAMES = 8


def pictures(runs: Sequence[Run]) -> Html:
    """The section."""
    shown = [_figure(run, runs) for run in runs if run.pictures]
    missing = [words for run in runs if (words := _missing(run, len(runs) > 1))]
    return section(
        "examples",
        "Examples right and wrong",
        [element("p", words, class_="muted") for words in missing],
        element("div", shown, class_="pictures") if shown else None,
        _evaluations(runs),
        _classes(runs),
        _left_out(runs),
    )


def _figure(run: Run, runs: Sequence[Run]) -> list[Html]:
    of = f"{run.label}: " if len(runs) > 1 else ""
    return [
        element(
            "figure",
            element("figcaption", of + PICTURES[p.name]),
            element("img", src=p.uri, alt=f"{of}{p.name}", width=p.width, height=p.height),
        )
        for p in run.pictures
    ]


def _missing(run: Run, several: bool) -> str | None:
    """Why there are no examples, where there are none."""
    of = f"{run.label}: " if several else ""
    if isinstance(run.config.model, LanguageModel):
        return f"{of}a language model classifies nothing; fnet sample continues a text with it."
    there = {p.name for p in run.pictures}
    if isinstance(run.config.model, Denoiser):
        return None if "samples.png" in there else f"{of}no samples.png: fnet sample draws it."
    names = [name for name in ("examples.png", "confusion.png") if name not in there]
    if not names:
        return None
    return (
        f"{of}no {' and no '.join(names)} to show: drawn when a run ends, "
        "and by fnet eval from its newest checkpoint."
    )


def _evaluations(runs: Sequence[Run]) -> list[Html]:
    """What `fnet eval` found, which may have looked otherwise than training does."""
    said = []
    for run in runs:
        if run.evaluated is None:
            continue
        found = [known(name.removeprefix("test/")) for name in run.evaluated.metrics]
        values = run.evaluated.metrics.values()
        scores = [
            f"{title} {kind.words(v)}" for (title, kind), v in zip(found, values, strict=True)
        ]
        of = f"{run.label}: " if len(runs) > 1 else ""
        words = f"{of}fnet eval after step {run.evaluated.step:,}: {', '.join(scores)}."
        said.append(element("p", words))
    return said


def _classes(runs: Sequence[Run]) -> Html | None:
    evaluated = [(i, run.evaluated) for i, run in enumerate(runs) if run.evaluated]
    scores: dict[str, dict[int, float]] = {}
    amounts: dict[str, set[int]] = {}
    kinds = set()
    for i, found in evaluated:
        for c in found.classes:
            score = c.accuracy if c.iou is None else c.iou
            if score is not None:
                scores.setdefault(c.name, {})[i] = score
                amounts.setdefault(c.name, set()).add(c.examples or c.pixels or 0)
                kinds.add("accuracy" if c.iou is None else "IoU")
    if not scores:
        return None
    alike = all(len(of) == 1 for of in amounts.values())  # else the runs had other test examples
    worst = sorted(scores, key=lambda name: min(scores[name].values()))
    which = "every class" if len(worst) <= _MOST_CLASSES else f"the {_MOST_CLASSES} lowest classes"
    rows: list[tuple[str, list[str | None]]] = []
    for name in worst[:_MOST_CLASSES]:
        of = scores[name]
        cells = [f"{of[i]:.2%}" if i in of else None for i, _ in evaluated]
        amount = [f"{min(amounts[name]):,}"] if alike else []
        rows.append((name, [*amount, *cells]))
    kind = " and ".join(sorted(kinds))
    heads = [runs[i].label if len(runs) > 1 else kind for i, _ in evaluated]
    caption = f"{kind} of {which}, lowest first, as fnet eval found it"
    return below_each_other(["amount"] * alike + heads, rows, caption, "class")


def _left_out(runs: Sequence[Run]) -> Html | None:
    rows = [
        [
            f"{run.label}: {bad.step:,}" if len(runs) > 1 else f"{bad.step:,}",
            bad.loss,
            bad.grad_norm,
            bad.origin,
            _some(bad.examples),
        ]
        for run in runs
        for bad in run.bad_steps[:_MOST_BAD_STEPS]
    ]
    if not rows:
        return None
    heads = ["step", "loss", "gradient norm", "what was not finite first", "examples of its batch"]
    return texts(
        heads, rows, f"Steps that were left out, the first {_MOST_BAD_STEPS} of a run at most"
    )


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more:,} more" if more > 0 else "")
