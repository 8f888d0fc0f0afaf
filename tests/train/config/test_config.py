"""Configs as JSON, also those with former names."""

import json

import pytest

import fnet
from train.config import Config, flatten, from_json, to_json, variants
from train.errors import UserError

VARIANTS_OF_SECTIONS = [
    Config(**{section: kind()})
    for section in ("data", "model", "grad")
    for kind in variants(section).values()
]

FORMER = [
    ({"data": {"source": "digits", "test_share": 0.5}}, {"data.test_fraction": 0.5}),
    (
        {"data": {"source": "image_folder", "held_out": "dev", "crop": "centre", "jitter": 0.4}},
        {"data.test_split": "dev", "data.crop": "center", "data.color_jitter": 0.4},
    ),
    ({"data": {"source": "image_folder", "keep": True}}, {"data.cache": True}),
    ({"model": {"name": "deeplab", "body": "resnet18"}}, {"model.backbone": "resnet18"}),
    (
        {"guard": {"skip": False, "max_bad_steps": 3}},
        {"nonfinite.skip": False, "nonfinite.max_skipped": 3},
    ),
    ({"memory": {"policy": "keep"}}, {"memory.policy": "none"}),
    ({"memory": {"policy": "named"}}, {"memory.policy": "norms"}),
    ({"memory": {"policy": "products"}}, {"memory.policy": "dots"}),
]
"""Configs with the former names in the CHANGELOG, and what they are now."""


def test_a_config_with_former_names_loads():
    for former, expected in FORMER:
        values = flatten(from_json(json.dumps(former), "config.json"))
        assert {name: values[name] for name in expected} == expected


def test_a_field_under_both_names_is_a_mistake():
    text = json.dumps({"data": {"source": "digits", "test_share": 0.1, "test_fraction": 0.2}})
    with pytest.raises(UserError, match=r"unknown field data.test_share"):
        from_json(text, "c.json")


def test_json_reads_back_as_an_equal_config():
    for config in VARIANTS_OF_SECTIONS:
        assert from_json(to_json(config), "config.json") == config


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
