"""Random views of one parameter: per-example gradients equal those of a loop of `jax.grad`.

Each day draws others. ``python tests/autodiff/per_example/test_random_views.py 0 2000`` checks the
draws of these seeds, and counts the wrong ones.
"""

import datetime
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from random_views import B, draw, gradients_of_a_loop

import fnet
from fnet.autodiff.examples import examples
from fnet.autodiff.per_example import parameter_gradients
from fnet.autodiff.per_example.backward import per_example_gradients

QUICK = 60
TODAY = 10_000 * datetime.date.today().toordinal()


@pytest.mark.sweep(5)
@pytest.mark.parametrize("number", range(QUICK))
def test_views_match_a_loop_over_examples(number, monkeypatch):
    check(TODAY + number, monkeypatch.setattr)


def check(seed, set_attribute=setattr):
    """Compare all that follows from the gradients of examples with a loop."""
    # Small parameters are materialized, unless they count as large.
    set_attribute(parameter_gradients, "_MATERIALIZED", (0.25, 2)[seed % 4 == 0])
    drawn = draw(seed)
    grads = gradients_of_a_loop(drawn)
    rounding = 2.0**-8 if drawn.is_rounded else 0.0
    norms = np.array([float(norm(g)) for g in grads])
    scale = norms.sum() + 1e-6
    clip = float(np.float32(np.median(norms) / 2 or 1))
    given = f"seed {seed}: {drawn.text}"

    def expect(total, weights, what, error=1e-5):
        expected = jax.tree.map(
            lambda *g: sum(w * a for w, a in zip(weights, g, strict=True)), *grads
        )
        difference = norm(jax.tree.map(np.subtract, jax.device_get(total), expected))
        assert difference <= max(error, rounding) * scale, f"{what}, {given}: {difference / scale}"

    @jax.jit
    def clipped(clip, mask, params, *batch):
        if seed % 3 == 2:  # as FSDP
            params = jax.lax.with_sharding_constraint(params, PartitionSpec())
        total, info = fnet.clipped_grad(drawn.loss, 1.0)(params, *batch, mask=mask, clip=clip)
        return total, info.norms

    def run(params, batch):
        plain, own = clipped(jnp.inf, np.ones(B), params, *batch)
        total, _ = clipped(clip, np.ones(B), params, *batch)
        one, _ = clipped(clip, 1.0 * (np.arange(B) == 0), params, *batch)
        np.testing.assert_allclose(own, norms, rtol=max(1e-3, rounding), atol=1e-5, err_msg=given)
        expect(plain, np.ones(B), "sum")
        expect(total, np.minimum(1, clip / np.maximum(norms, 1e-30)), "clipped sum", 1e-3)
        assert norm(one) <= 1.001 * clip, f"sensitivity, {given}: {norm(one) / clip} clips"

    if seed % 3 == 0:
        run(drawn.params, drawn.batch)
        alone = jax.jit(fnet.per_example_grad(drawn.loss))(drawn.params, *drawn.batch)
        alone = jax.device_get(alone)
        for b in range(B):
            own = jax.tree.map(lambda a, b=b: a[b], alone)
            expect(own, np.arange(B) == b, "per-example gradient")
    elif seed % 3 == 1:
        run(drawn.params, drawn.batch)
        check_products(drawn, grads, max(1e-4, 2 * rounding), given)  # Both gradients round.
    else:
        mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
        with jax.set_mesh(mesh):
            run(*on_four_devices(mesh, drawn.params, drawn.batch))


def check_products(drawn, grads, error, given):
    """Check inner products with the sum of gradients of other examples."""
    scales, weights = np.float32([1.0, 0.5, 0.0, 2.0]), np.float32([0.5, 1.0, 2.0, 0.0])

    @jax.jit
    def products(params, *batch):
        own, other = (
            per_example_gradients("test", drawn.loss, params, examples("test", order))
            for order in (batch, [a[::-1] for a in batch])
        )
        return own.sum_and_products(scales, other, weights)

    total, values = products(drawn.params, *drawn.batch)
    flat = [np.concatenate([a.ravel() for a in jax.tree.leaves(g)]) for g in grads]
    direction = sum(w * g for w, g in zip(weights, flat[::-1], strict=True))
    expected = [float(g @ direction) for g in flat]
    size = max(map(norm, flat)) * norm(direction) + 1e-9
    np.testing.assert_allclose(values, expected, rtol=0, atol=error * size, err_msg=given)
    own = np.concatenate([a.ravel() for a in jax.tree.leaves(jax.device_get(total))])
    wanted = sum(s * g for s, g in zip(scales, flat, strict=True))
    assert norm(own - wanted) <= error * sum(map(norm, flat)), f"weighted sum, {given}"


def on_four_devices(mesh, params, batch):
    """Shard parameters and batch over four devices."""

    def shard(a):
        axis = next((i for i, n in enumerate(a.shape) if n % 4 == 0), None)
        spec = [None if i != axis else "fsdp" for i in range(a.ndim)]
        return jax.device_put(a, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(shard, params), [
        jax.device_put(a, NamedSharding(mesh, PartitionSpec("fsdp"))) for a in batch
    ]


def norm(tree):
    return float(np.sqrt(sum(np.square(a).sum() for a in jax.tree.leaves(jax.device_get(tree)))))


def main(first, last):
    """Check the draws of some seeds, and print what is wrong."""
    wrong = refused = 0
    for seed in range(first, last):
        try:
            check(seed)
        except AssertionError as error:
            wrong += 1
            print("WRONG", " ".join(str(error).split())[:400], flush=True)
        except Exception as error:
            refused += 1
            print(
                "RAISED", type(error).__name__, seed, draw(seed).text, str(error)[:300], flush=True
            )
        if seed % 20 == 19:
            jax.clear_caches()
            print(f"{seed + 1 - first} draws, {wrong} wrong, {refused} raised", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
