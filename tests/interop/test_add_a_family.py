"""A family of published models is one file: the page's own."""

import re
import runpy
from pathlib import Path

import chex
import numpy as np
import pytest
from pretrained_cases import weights
from pretrained_folder import LLAMA

import fnet
from fnet.interop.huggingface import FAMILIES, build_model

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "add_a_family.md"
CONFIG = LLAMA | {
    "model_type": "calm", "architectures": ["CalmForCausalLM"], "residual_multiplier": 0.4,
    "norm_eps": 1e-3, "dropout_rate": 0.1, "shared_norms": False,
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, 256, (2, 7))


@pytest.fixture(autouse=True)
def family(tmp_path):
    """Import the file of the page, in a folder of its own."""
    FAMILIES.pop("calm", None)  # of a test that runs the blocks of pages
    known = dict(FAMILIES)
    (tmp_path / "calm.py").write_text(
        re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]
    )
    runpy.run_path(str(tmp_path / "calm.py"))
    yield
    FAMILIES.clear()
    FAMILIES.update(known)


def tensors_of(config):
    return weights({t.name: t.file_shape for t in build_model(config).tensors})


def logits_of(config, tensors):
    """The model in NumPy."""

    def norm(x, name):
        mean = np.square(x).mean(-1, keepdims=True)
        return x / np.sqrt(mean + config["norm_eps"]) * tensors[f"{name}.weight"]

    def dense(x, name):
        return x @ tensors[f"{name}.weight"].T

    def heads(x):
        return x.reshape(*x.shape[:2], -1, 8).transpose(0, 2, 1, 3)

    def rotate(x):
        angle = np.arange(x.shape[2])[:, None] * 10_000.0 ** (-np.arange(4) / 4)
        a, b = x[..., :4], x[..., 4:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    def attention(x, name):
        q, k, v = (heads(dense(x, f"{name}.{part}_proj")) for part in "qkv")
        k, v = (np.repeat(a, 2, axis=1) for a in (rotate(k), v))
        scores = rotate(q) @ k.transpose(0, 1, 3, 2) / np.sqrt(8)
        scores = np.where(np.tri(x.shape[1], dtype=bool), scores, -np.inf)
        p = np.exp(scores - scores.max(-1, keepdims=True))
        y = p / p.sum(-1, keepdims=True) @ v
        return dense(y.transpose(0, 2, 1, 3).reshape(x.shape), f"{name}.o_proj")

    def feed_forward(x, name):
        gate = dense(x, f"{name}.gate_proj")
        return dense(gate / (1 + np.exp(-gate)) * dense(x, f"{name}.up_proj"), f"{name}.down_proj")

    x, c = tensors["model.embed_tokens.weight"][TOKENS], config["residual_multiplier"]
    for i in range(config["num_hidden_layers"]):
        block = f"model.layers.{i}"
        x = x + c * norm(attention(x, f"{block}.self_attn"), f"{block}.attention_norm")
        x = x + c * norm(feed_forward(x, f"{block}.mlp"), f"{block}.mlp_norm")
    return dense(norm(x, "model.norm"), "lm_head")


def test_logits_are_those_of_the_formula_and_tensors_come_back():
    tensors = tensors_of(CONFIG)
    model, params = fnet.interop.from_huggingface(CONFIG, tensors)
    logits, _ = model.apply(params, {}, TOKENS, train=False)
    chex.assert_trees_all_close(logits, logits_of(CONFIG, tensors), atol=1e-4)
    chex.assert_trees_all_equal(fnet.interop.to_huggingface(model, params), tensors)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"shared_norms": True}, "calm: shared_norms True is not supported, only False"),
        ({"qk_scale": 2.0}, "calm: unknown options in config.json: qk_scale=2.0"),
        ({"architectures": ["CalmModel"]}, "'CalmModel' is not supported, only CalmForCausalLM"),
        ({"model_type": "wild"}, "'wild' is not supported, only .*calm, clip.*of FNET_PLUGINS"),
    ],
)
def test_other_options_are_refused_by_name(options, match):
    with pytest.raises(ValueError, match=match):
        build_model(CONFIG | options)


def test_a_model_type_has_one_row():
    with pytest.raises(ValueError, match="'llama' is registered twice"):
        fnet.interop.huggingface.register(FAMILIES["llama"])
