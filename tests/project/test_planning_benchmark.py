"""The benchmark of plans: checkpoints placed by hand in modules of other libraries."""

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx

pytest.importorskip("equinox")
hk = pytest.importorskip("haiku")

from benchmarks import planning  # noqa: E402
from benchmarks.checkpointed import HAND, linen_blocks  # noqa: E402
from benchmarks.public_models import PUBLIC, cover_calls  # noqa: E402


def remats(f, *args):
    return str(jax.make_jaxpr(f)(*args)).count("remat2[") or str(jax.make_jaxpr(f)(*args)).count(
        "checkpoint["
    )


COVERED = {"none": 0, "every block": 4, "every second block": 2, "every block, dots saved": 4}


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.tanh(nn.Dense(8)(x))


@pytest.mark.parametrize("variant", HAND)
def test_covers_blocks_of_linen(variant):
    make = linen_blocks(HAND[variant], LinenBlock, 4)

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            for i in range(4):
                x = make(name=f"block{i}")(x)
            return x

    x, network = jnp.ones((2, 8)), Network()
    params = network.init(jax.random.key(0), x)
    for _ in range(2):  # each trace covers the same blocks
        assert remats(network.apply, params, x) == COVERED[variant]


@pytest.mark.parametrize("variant", HAND)
def test_covers_calls_of_nnx(variant):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(8, 8, rngs=rngs)

        def __call__(self, x, *, scale):
            return jnp.tanh(self.linear(x)) * scale

    blocks = [Block(nnx.Rngs(i)) for i in range(4)]
    graph, params = nnx.split(nnx.List(blocks))

    def apply(params, x):
        for block in nnx.merge(graph, params):
            x = block(x, scale=2.0)
        return x

    x = jnp.ones((2, 8))
    expected = apply(params, x)
    cover_calls(HAND[variant], Block, 4, nnx.remat)
    assert remats(apply, params, x) == COVERED[variant]
    assert jnp.array_equal(apply(params, x), expected)


def test_names_what_is_missing(tmp_path):
    for name, public in PUBLIC.items():
        reason = planning.missing(name, str(tmp_path))
        folder = tmp_path / public.repository.split("/")[1]
        assert reason == f"{name}: expected a checkout of {public.repository} in {folder}"


def test_a_variant_is_beaten_by_fewer_bytes_and_no_more_flops():
    def program(predicted, flops):
        return {"predicted": predicted, "flops": flops}

    others = [program(100, 1.0), program(50, 1.3)]
    beaten = functools.partial(planning.is_beaten, others=others)
    assert not any(beaten(program(*p)) for p in ((100, 1.0), (50, 1.3), (70, 1.1), (40, 2.0)))
    assert all(beaten(program(*p)) for p in ((110, 1.0), (60, 1.3), (120, 1.5)))
