"""200 random configs, many of them invalid: each trains two steps, or ends with a one-line error.

Fields are drawn by their types, with sizes small enough to compile. In a third of the configs, some
fields have a wrong type or are out of range. Deep networks and packages that are not installed are
excluded; other tests build them.
"""

import json
import types
import typing
from dataclasses import fields

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from program_cases import fnet_command
from pydantic import TypeAdapter, ValidationError

from fnet.layers.activations import ACTIVATIONS
from train.config import Config, variants
from train.networks.images import Activation

WRONG = st.sampled_from([-1, 0, 1.5, "x", "", None, True, [], {}, [-1]])
EXCLUDED = {
    # Only deeplab takes masks, and only published models take pairs of answers.
    "data": {"huggingface", "segmentation_folder", "preference_file"},
    "model": {"resnext", "densenet", "wider_resnet", "deeplab", "pretrained", "swin"},
}
TEXT_MODELS = {"language_model"}
TEXT_SOURCES = {"text_file", "chat_file"}


def values(hint):
    """Strategy for small values of a type, most of them in range."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return st.sampled_from(sorted(ACTIVATIONS)) if hint == Activation else values(args[0])
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values, args))
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values(args[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*map(values, args)).map(list)
    return {
        bool: st.booleans(),
        int: st.sampled_from([1, 2, 2, 3, 4, 4, 8, 8, 16]),
        float: st.sampled_from([0.0, 0.001, 0.01, 0.01, 0.1, 0.1, 0.5, 0.9, 1.0, 2.0]),
        str: st.sampled_from(["64MiB", "1GiB", "x", "label", "test"]),
        type(None): st.none(),
    }[hint]


VARIANTS = {kind for f in fields(Config) for kind in variants(f.name).values()}


def is_valid(hint):
    adapter = TypeAdapter(hint)

    def is_allowed(value):
        try:
            adapter.validate_python(value)
        except ValidationError:
            return False
        return True

    return is_allowed


@st.composite
def sections(draw, kind, wrong):
    """Strategy for a section with some fields; the others have their defaults."""
    hints = typing.get_type_hints(kind, include_extras=True)
    names, section = [f.name for f in fields(kind)], {}
    if kind in VARIANTS:  # their first field names the variant
        tag, *names = names
        section[tag] = typing.get_args(typing.get_type_hints(kind)[tag])[0]
    for name in draw(st.permutations(names))[: draw(st.integers(0, 4))]:
        valid = values(hints[name]).filter(is_valid(hints[name]))
        section[name] = draw(WRONG if wrong and draw(st.integers(0, 4)) == 0 else valid)
    return section


SMALL = {
    "preact_resnet": {"widths": [4]},
    "resnet9": {"widths": [4, 8, 8]},
    "resnet": {"depth": 18, "stem": "small"},
    "revnet": {"widths": [8, 16], "blocks": [1, 1]},
    "vit": {"width": 12, "blocks": 1},
    "convnext": {"blocks": [1, 1], "widths": [4, 8], "patch": 2},
    "efficientnet": {"variant": "mobilenet_v3_small"},
    "regnet": {"variant": "regnetx_002"},
    "mlp": {"hidden": [16]},
    "language_model": {"width": 16, "heads": 2},
    "denoiser": {"width": 16, "heads": 2},
    "digits": {"batch_size": 8},
    "synthetic": {"batch_size": 8, "image_size": 16, "examples": 64},
    "image_folder": {"batch_size": 8, "image_size": 16, "path": "images"},
    "arrays": {"batch_size": 8, "path": "data.npz"},
    "text_file": {"batch_size": 8, "context": 16, "path": "text.txt"},
    "chat_file": {
        **{"batch_size": 8, "context": 16, "path": "text.jsonl"},
        **dict.fromkeys(["test_path", "tokenizer", "chat_template", "user"]),
        **dict.fromkeys(["prompt", "answer", "text", "messages"]),
    },
}
"""Fields that make networks small and give the paths of data."""


@st.composite
def configs(draw):
    """Strategy for configs as JSON, a third of them invalid."""
    wrong = draw(st.integers(0, 2)) == 0
    config = {"train": {"steps": 2, "log_every": 1}}
    for f in fields(Config):
        if sections_by_name := variants(f.name):
            names = set(sections_by_name) - EXCLUDED.get(f.name, set())
            if f.name == "model" and not wrong:
                names &= (
                    TEXT_MODELS if config["data"]["source"] in TEXT_SOURCES else names - TEXT_MODELS
                )
            name = draw(st.sampled_from(sorted(names)))
            config[f.name] = draw(sections(sections_by_name[name], wrong)) | SMALL.get(name, {})
        elif f.name not in ("name", "tracking") and draw(st.booleans()):
            section = draw(sections(typing.get_type_hints(Config)[f.name], wrong))
            config[f.name] = section | config.get(f.name, {})
    if wrong and draw(st.integers(0, 4)) == 0:
        config[draw(st.sampled_from(["modle", "opt", "steps"]))] = 1
    return config


def test_integer_fields_have_an_upper_bound():
    hints = typing.get_type_hints(Config)
    for kind in {*VARIANTS, *(hints[f.name] for f in fields(Config) if not variants(f.name))} - {
        str
    }:
        adapter = TypeAdapter(kind)
        for name in (f.name for f in fields(kind)):
            for value in (2**32, *([2**32] * n for n in (1, 2, 3, 4))):
                try:
                    loaded = getattr(adapter.validate_json(json.dumps({name: value})), name)
                except ValidationError:
                    continue
                assert {type(n) for n in np.ravel(loaded).tolist()} == {float}, (kind, name)


@pytest.fixture
def files(workplace):
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for name in "ab":
            folder = workplace / "images" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.fromarray(rng.integers(0, 256, (20, 24, 3), np.uint8)).save(
                    folder / f"{i}.png"
                )
    x, y = rng.integers(0, 256, (40, 8, 8, 3), np.uint8), np.arange(40) % 3
    np.savez(workplace / "data.npz", x=x, y=y)
    (workplace / "text.txt").write_text("to be or not to be, that is the question\n" * 40)
    lines = [{"prompt": f"{i}?", "answer": "yes", "text": "x" * i} for i in range(1, 30)]
    (workplace / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return workplace


@pytest.mark.slow
def test_random_configs_train_or_are_refused_in_one_line(files, capsys):
    outcomes = {"trained": 0, "refused": 0}

    @settings(
        max_examples=200,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(configs())
    def check(config):
        number = len(list(files.glob("*.json")))
        path = files / f"{number}.json"
        path.write_text(json.dumps(config))
        code = 0
        try:
            fnet_command("train", path, "--out", f"run{number}")
        except SystemExit as end:
            code = end.code
        jax.clear_caches()
        output = capsys.readouterr()
        if code == 0:
            lines = (files / f"run{number}" / "metrics.jsonl").read_text().splitlines()
            assert json.loads(lines[-1])["step"] == 2
            outcomes["trained"] += 1
        else:
            assert code == 2, output
            assert len(output.err.strip().splitlines()) == 1, output.err
            assert not (files / f"run{number}" / "metrics.jsonl").exists()
            outcomes["refused"] += 1

    check()
    assert min(outcomes.values()) > 20, outcomes
