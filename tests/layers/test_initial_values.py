"""Initial values of parameters: the distributions of the papers, and what is constant."""

import functools

import jax
import numpy as np
import pytest
from scipy import stats

from fnet import layers, models
from fnet.layers.experts import Router
from fnet.layers.global_response_norm import global_response_norm
from fnet.layers.layer_scale import layer_scale
from fnet.models.swin import window_attention
from fnet.models.vit import attention_pooling, image_transformer

softplus = functools.partial(np.logaddexp, 0)
CUT = stats.truncnorm(-2, 2)
TIME_STEPS = stats.loguniform(1e-3, 1e-1)
NORMAL = stats.norm(scale=0.02)


def scaled(gain, fan_in):
    """A normal distribution cut at two deviations, of variance gain / fan_in after the cut."""
    return stats.truncnorm(-2, 2, scale=np.sqrt(gain / fan_in) / CUT.std())


def within(bound):
    return stats.uniform(-bound, 2 * bound)


MAMBA, MAMBA2, RG_LRU = layers.mamba(512), layers.mamba2(512, head=2), layers.rg_lru(512)
EXPERTS = layers.experts(16, 32, 4, 2, router=Router(choice_bias=True, expert_scale=True))
BLOCK = layers.Block(layers.attention(8, 1), layers.feed_forward(8, 4))
TOKENS = image_transformer(
    image_shape=(64, 64, 3), patch=8, width=8, blocks=[BLOCK], registers=90, mask_token=True
)
LANGUAGE = models.language_model(vocabulary=9, width=8, blocks=[BLOCK], positions=99)
DENOISER = models.denoiser(image_shape=(16, 16, 1), width=8, blocks=[BLOCK])
POOLING = attention_pooling(512, 1, layers.feed_forward(512, 1))
DRAWN = [
    (layers.dense(40, 50), "kernel", None, scaled(2, 40)),
    (layers.conv(10, 40, 3), "kernel", None, scaled(2, 90)),
    (layers.conv(10, 40, 3, groups=2), "kernel", None, scaled(2, 45)),
    (layers.embedding(99, 16), "embedding", None, stats.norm(scale=1 / 4)),
    (layers.causal_conv(500, 4), "kernel", None, within(1 / 2)),
    (EXPERTS, "experts/gate/kernel", None, scaled(2, 16)),
    (EXPERTS, "experts/contract/kernel", None, scaled(2, 32)),
    (MAMBA, "dt_bias", softplus, TIME_STEPS),
    (MAMBA, "dt/kernel", None, within(32**-0.5)),
    (MAMBA, "in/kernel", None, within(512**-0.5)),
    (MAMBA2, "dt_bias", softplus, TIME_STEPS),
    (MAMBA2, "A_log", np.exp, stats.uniform(1, 15)),
    (layers.gated_delta_net(8, heads=600, head_dim=1), "A_log", np.exp, stats.uniform(0.01, 15.99)),
    (RG_LRU, "L", lambda a: np.exp(-8 * softplus(a)), stats.uniform(0.9, 0.099)),
    (RG_LRU, "input_gate/kernel", None, scaled(1, 128)),
    (RG_LRU, "recurrence_gate/kernel", None, scaled(1, 128)),
    (TOKENS, "pos_embedding", None, NORMAL),
    (TOKENS, "register_tokens", None, NORMAL),
    (POOLING, "probe", None, stats.norm(scale=512**-0.5)),
    (window_attention(8, 2, 12, 0), "position_bias/embedding", None, stats.truncnorm(-2, 2, scale=0.02)),
    (LANGUAGE, "pos_embedding", None, NORMAL),
    (DENOISER, "pos_embedding", None, NORMAL),
]  # fmt: skip
CONSTANT = [
    (layers.dense(2, 3), {"bias": 0}),
    (layers.conv(2, 3), {"bias": 0}),
    (layers.causal_conv(3), {"bias": 0}),
    (layers.abn(3), {"gamma": 1, "beta": 0, "running_mean": 0, "running_var": 1}),
    (layers.batch_norm(3), {"gamma": 1, "beta": 0, "running_mean": 0, "running_var": 1}),
    (layers.layer_norm(3), {"scale": 1, "bias": 0}),
    (layers.layer_norm(3, bias=False), {"scale": 1}),
    (layers.rms_norm(3), {"scale": 1}),
    (layers.rms_norm(3, offset=1), {"scale": 0}),
    (layers.group_norm(32), {"scale": 1, "bias": 0}),
    (layers.dynamic_tanh(3, alpha=0.7), {"alpha": np.float32(0.7), "scale": 1, "bias": 0}),
    (global_response_norm(3), {"scale": 0, "bias": 0}),
    (layer_scale(3, initial=0.25), {"scale": 0.25}),
    (MAMBA, {"D": 1, "conv/bias": 0}),
    (MAMBA2, {"D": 1}),
    (RG_LRU, {"recurrence_gate/bias": 0, "input_gate/bias": 0}),
    (layers.gated_delta_net(8, heads=4, head_dim=2), {"dt_bias": 1}),
    (EXPERTS, {"router/choice_bias": 0, "router/expert_scale": 1}),
    (TOKENS, {"mask_token": 0}),
    (DENOISER, {"blocks/0/modulation/kernel": 0, "modulation/kernel": 0, "output/kernel": 0, "output/bias": 0}),
]  # fmt: skip


@functools.cache
def initial(layer):
    """Parameters and statistics by name. This generator compiles in a third of the time."""
    return flat(jax.jit(layer.init)(jax.random.key(1, impl="unsafe_rbg")))


def flat(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(p[1:], simple=True, separator="/"): a for p, a in leaves}


@pytest.mark.parametrize(("layer", "name", "transform", "distribution"), DRAWN)
def test_a_parameter_is_drawn_from_its_distribution(layer, name, transform, distribution):
    values = np.ravel(initial(layer)[name])
    assert stats.kstest(transform(values) if transform else values, distribution.cdf).pvalue > 1e-3


def test_a_parameter_starts_with_its_constant():
    for layer, constants in CONSTANT:
        values = dict(initial(layer))
        for name, constant in constants.items():
            np.testing.assert_array_equal(np.unique(values.pop(name)), [constant])
        assert not {"scale", "bias", "gamma", "beta"} & values.keys()
