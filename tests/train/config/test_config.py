"""Configs as JSON."""

import json

import pytest

import fnet
from train.config import Config, from_json, to_json, variants
from train.errors import UserError

VARIANTS_OF_SECTIONS = [
    Config(**{section: kind()})
    for section in ("data", "model", "grad")
    for kind in variants(section).values()
]


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
