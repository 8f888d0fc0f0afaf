"""Configs as JSON."""

import json

import pytest

import fnet
from train import config as configs
from train.arguments import AttributeArguments, ExportArguments, TextArguments
from train.config import Config, from_json, to_json, variants
from train.config.section import without_effect
from train.errors import UserError

VARIANTS_OF_SECTIONS = [
    Config(**{section: kind()})
    for section in ("data", "model", "grad")
    for kind in variants(section).values()
]


def test_json_reads_back_as_an_equal_config():
    for config in VARIANTS_OF_SECTIONS:
        assert from_json(to_json(config), "config.json") == config


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (configs.Optim(name="adam", momentum=0.5), ["momentum: 0.5 has no effect with name adam"]),
        (configs.Optim(name="compact_sgd", momentum=0.5, nesterov=True), []),
        (configs.Optim(decay_rate=0.5, galore_rank=8), ["decay_rate: 0.5", "galore_rank: 8"]),
        (configs.Optim(schedule="step", decay_epochs=(3.0,)), []),
        (configs.Nonfinite(skip=False, max_skipped=3), ["max_skipped: 3"]),
        (configs.ImageTable(crop="center", min_area=0.5, magnitude=5), ["min_area", "magnitude"]),
        (configs.ArrayFile(padding=2), ["padding: 2"]),
        (configs.ChatFile(test_path="a", test_fraction=0.5), ["test_fraction: 0.5"]),
        (configs.ImageFolder(folds=3, test_fraction=0.5), ["test_fraction: 0.5"]),
        (configs.Pretrained(lora_alpha=8.0), ["lora_alpha: 8.0 has no effect with lora_rank None"]),
        (configs.PreferenceFile(objective="reward", beta=0.5), ["beta: 0.5"]),
        (configs.LanguageModel(mixers=("mamba",), window=4, expand=3.0), ["window: 4"]),
        (configs.LanguageModel(context_rate=0.5, expand=3.0), ["context_rate: 0.5", "expand: 3.0"]),
        (ExportArguments(format="onnx", names="timm"), ["names: timm has no effect with format"]),
        (AttributeArguments(method="tracin", damping=0.5, label="a"), ["label: a", "damping: 0.5"]),
        (TextArguments(system="a"), ["system: a has no effect with chat False"]),
    ],
)
def test_fields_that_do_not_count_are_named(section, expected):
    found = without_effect(section, str)
    for text, start in zip(found, expected, strict=True):
        assert text.startswith(start)


def test_no_default_is_without_effect():
    for config in VARIANTS_OF_SECTIONS:
        assert not any(without_effect(section, str) for section in config.sections.values())


def test_json_names_the_version_of_fnet():
    assert json.loads(to_json(Config()))["fnet_version"] == fnet.__version__


def test_a_mistake_in_the_config_of_another_version_names_that_version():
    text = json.dumps({"fnet_version": "9.8.7", "optim": {"power": 2}})
    with pytest.raises(
        UserError, match=r"c.json: unknown field optim.power .*\(written by fnet 9.8.7, this is"
    ):
        from_json(text, "c.json")
    with pytest.raises(
        UserError, match=r"unknown field optim.power \(did you mean optim.clip_norm\?\)$"
    ):
        from_json(json.dumps({"optim": {"power": 2}}), "c.json")


@pytest.mark.parametrize("text", ["[]", "3", "{", "null", b"\xff{}", "[" * 100_000])
def test_json_that_is_no_config_is_refused(text):
    with pytest.raises(UserError, match=r"c.json: not a config: "):
        from_json(text, "c.json")


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(UserError, match=r"optim.clip_norm: expected a finite number, got inf"):
        from_json('{"optim": {"clip_norm": 1e999}}', "c.json")
