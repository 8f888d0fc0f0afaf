"""A small network, its loss and a batch for the tests of `optimizer_in_backward`."""

import jax
import jax.numpy as jnp

import fnet
from fnet import layers, losses, repeat, serial
from fnet.autodiff.fused_optimizer.mode import optimizer_in_backward

WIDTH = 8
IN_BACKWARD = optimizer_in_backward("blocks")


def small_block():
    return serial(dense=layers.dense(WIDTH, WIDTH), act=layers.activation("relu"))


def classifier(blocks):
    return serial(embed=layers.dense(5, WIDTH), blocks=blocks, head=layers.dense(WIDTH, 3))


SMALL = classifier(repeat(small_block(), 3))


def loss_of(model, penalty=lambda params, state: 0.0, apply=None):
    def loss(params, state, batch, key):
        logits, state = (apply or model.apply)(params, state, batch["x"], key=key, train=True)
        per_example = losses.cross_entropy(logits, batch["label"]) + penalty(params, state)
        return per_example, fnet.Aux(state, {})

    return loss


BATCH = {
    "x": jax.random.normal(jax.random.key(1), (8, 5)),
    "label": jnp.arange(8) % 3,
    "weight": jnp.asarray([1.0] * 7 + [0.0]),
}
