"""The configs of runs, and what the runs were made with: whole for one, differences for several."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from train import config as configs
from train.config import Config
from train.output.report.html import Html, element
from train.output.report.runs import Run
from train.output.report.tables import pairs, section, side_by_side


def config(runs: Sequence[Run]) -> Html:
    """The section."""
    if len(runs) == 1:
        default = configs.flatten(_defaults(runs[0].config))
        rows = configs.flatten(runs[0].config)
        return section(
            "config",
            "Config",
            pairs(
                [(n, str(_words(v)), v != default[n]) for n, v in rows.items()],
                "Bold: not the default",
            ),
        )
    different, same = differences([run.config for run in runs])
    rows_ = [(name, [_words(v) for v in values]) for name, values in different.items()]
    said = element("p", "The configs are equal, field by field.")
    if rows_:
        said = side_by_side(rows_, runs, "Fields that differ; - where a run has no such field")
    equal = element(
        "details",
        element("summary", f"{len(same)} fields are the same"),
        pairs([(n, str(_words(v)), False) for n, v in same.items()]),
    )
    return section("config", "Config differences", said, equal)


ABSENT = object()
"""Stands for the value of a field that a config has not."""


def differences(all_: Sequence[Config]) -> tuple[dict[str, list[Any]], dict[str, Any]]:
    """Fields by dotted name: those that differ, with each config's value, and the others.

    A field that a config has not, because its section is of another kind, is `ABSENT`.
    """
    flat = [configs.flatten(c) for c in all_]
    names = list(dict.fromkeys(name for fields in flat for name in fields))
    sections = [f.name for f in dataclasses.fields(Config)]
    names.sort(key=lambda name: sections.index(name.partition(".")[0]))
    values = {name: [fields.get(name, ABSENT) for fields in flat] for name in names}
    different = {n: v for n, v in values.items() if any(x != v[0] for x in v)}
    return different, {n: v[0] for n, v in values.items() if n not in different}


def environment(runs: Sequence[Run]) -> Html:
    """The section: versions, as the summaries have them."""
    versions = [run.summary.versions if run.summary else {} for run in runs]
    names = list(dict.fromkeys(name for v in versions for name in v))
    rows = [(name, [v.get(name) for v in versions]) for name in names]
    missing = [run.label for run, v in zip(runs, versions, strict=True) if not v]
    absent = None
    if missing:
        of = f" of {', '.join(missing)}" if len(runs) > 1 else ""
        words = (
            f"The versions{of} are not known: summary.json has them, which is written at the end."
        )
        absent = element("p", words, class_="muted")
    caption = "What the runs were made with" if len(runs) > 1 else "What the run was made with"
    return section(
        "environment",
        "Environment",
        absent,
        side_by_side(rows, runs, caption, mark=True) if rows else None,
    )


def _defaults(c: Config) -> Config:
    sections = {
        f.name: type(value)()
        for f in dataclasses.fields(c)
        if dataclasses.is_dataclass(value := getattr(c, f.name)) and not isinstance(value, type)
    }
    return Config(**sections)  # type: ignore[arg-type]


def _words(value: Any) -> str | None:
    """A field's value as people write it; None where there is no such field."""
    if value is ABSENT:
        return None
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value)) or "none"
    if value is None:
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
