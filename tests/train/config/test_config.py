"""Configs as JSON, also those that earlier versions wrote."""

import json
from dataclasses import fields

import pytest

import fnet
from train import config as configs
from train.config import (
    Config,
    DeepLab,
    Memory,
    Nonfinite,
    flatten,
    from_json,
    to_json,
    variants,
)
from train.errors import UserError

VARIANTS_OF_SECTIONS = [
    Config(**{section: kind()})
    for section in ("data", "model", "grad")
    for kind in variants(section).values()
]

DATA = [
    ({"source": "digits", "test_share": 0.5}, {"test_fraction": 0.5}),
    (
        {
            "source": "image_folder",
            "held_out": "dev",
            "crop": "centre",
            "jitter": 0.4,
            "keep": True,
        },
        {"test_split": "dev", "crop": "center", "color_jitter": 0.4, "cache": True},
    ),
    ({"source": "arrays", "crop": "centre", "test_share": 0.5}, {"test_fraction": 0.5}),
    ({"source": "huggingface", "crop": "padded", "held_out": "dev"}, {"test_split": "dev"}),
    ({"source": "segmentation_folder", "jitter": 0.4}, {"color_jitter": 0.4}),
    ({"source": "text_file", "test_share": 0.5}, {"test_fraction": 0.5}),
]
"""Data sections as fnet 0.1 wrote them, and what their fields are now."""


@pytest.mark.parametrize(("former", "expected"), DATA, ids=lambda section: section.get("source"))
def test_data_of_an_earlier_version_loads(former, expected):
    config = from_json(json.dumps({"data": former}), "config.json")
    assert config.data.source == former["source"]
    assert {name: getattr(config.data, name) for name in expected} == expected


def test_other_sections_of_an_earlier_version_load():
    former = {
        "model": {"name": "deeplab", "body": "resnet18"},
        "guard": {"skip": False, "max_bad_steps": 3},
        "memory": {"policy": "products"},
    }
    config = from_json(json.dumps(former), "config.json")
    assert config.model == DeepLab(backbone="resnet18")
    assert config.nonfinite == Nonfinite(skip=False, max_skipped=3)
    assert config.memory == Memory(policy="dots")


@pytest.mark.parametrize(
    ("former", "current"), [("keep", "none"), ("named", "norms"), ("products", "dots")]
)
def test_remat_policies_of_an_earlier_version_load(former, current):
    config = from_json(json.dumps({"memory": {"policy": former}}), "config.json")
    assert config.memory.policy == current


def test_former_names_map_to_existing_fields():
    known = {name for section in VARIANTS_OF_SECTIONS for name in flatten(section)}
    for section, names in configs._RENAMED_FIELDS.items():
        for former, current in names.items():
            assert f"{section}.{current}" in known
            assert f"{section}.{former}" not in known
    assert set(configs._RENAMED_SECTIONS.values()) <= {f.name for f in fields(Config)}


@pytest.mark.parametrize("config", VARIANTS_OF_SECTIONS, ids=str)
def test_json_reads_back_as_an_equal_config(config):
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


def test_a_field_under_both_names_is_a_mistake():
    text = json.dumps({"data": {"source": "digits", "test_share": 0.1, "test_fraction": 0.2}})
    with pytest.raises(UserError, match=r"unknown field data.test_share"):
        from_json(text, "c.json")


@pytest.mark.parametrize("text", ["[]", "3", "{", "null", b"\xff{}", "[" * 100_000])
def test_json_that_is_no_config_is_refused(text):
    with pytest.raises(UserError, match=r"c.json: not a config: "):
        from_json(text, "c.json")


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(UserError, match=r"optim.clip_norm: expected a finite number, got inf"):
        from_json('{"optim": {"clip_norm": 1e999}}', "c.json")
