"""Defaults of all fields and flags: changing one changes the runs of everyone who leaves it out.

``python tests/train/config/test_defaults.py`` writes them again; say so in the changelog.
"""

import dataclasses
import inspect
import json
from pathlib import Path

from train import arguments, config
from train.config.registry import all_variants

KEPT = Path(__file__).with_name("defaults.json")


def defaults():
    of_commands = [
        kind
        for name, kind in vars(arguments).items()
        if name.endswith("Arguments") and dataclasses.is_dataclass(kind)
    ]
    sections = [config.Config, *(type(s) for s in config.Config().sections.values())]
    return {
        kind.__name__: {
            name: repr(p.default)
            for name, p in inspect.signature(kind).parameters.items()
            if p.default is not p.empty and "<factory>" not in repr(p.default)
        }
        for kind in dict.fromkeys([*sections, *all_variants(), *of_commands])
        if kind.__module__.startswith("train.")
    }


def test_defaults_are_those_that_users_rely_on():
    assert defaults() == json.loads(KEPT.read_text())


if __name__ == "__main__":
    KEPT.write_text(json.dumps(defaults(), indent=1, sort_keys=True) + "\n")
