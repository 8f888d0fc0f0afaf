"""`linear_cross_entropy` under JAX transforms and on several devices."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from linear_cross_entropy_cases import arrays, reference_losses, value_and_gradients

from fnet.backward_pass import recompute
from fnet.losses.linear_cross_entropy import linear_cross_entropy


@pytest.mark.usefixtures("float64")
def test_per_example_gradients_by_vmap_match_a_loop():
    x, kernel, bias, labels, _ = arrays(4, 3)

    def example_loss(x, kernel, bias, labels):
        return linear_cross_entropy(x, kernel, labels, bias=bias, chunk=8, z_loss=0.01).sum()

    gradients = jax.jit(jax.grad(example_loss, argnums=(0, 1, 2)))
    got = jax.jit(jax.vmap(gradients, (0, None, None, 0)))(x, kernel, bias, labels)
    grads_by_example = [
        gradients(row, kernel, bias, label)
        for row, label in zip(*map(np.asarray, (x, labels)), strict=True)
    ]
    chex.assert_trees_all_close(
        got, jax.tree.map(lambda *g: np.stack(g), *grads_by_example), atol=1e-12
    )


@pytest.mark.parametrize("outer", [jax.jvp, jax.vjp], ids=["forward", "reverse"])
@pytest.mark.usefixtures("float64")
def test_second_derivatives_match_the_reference(outer):
    x, kernel, bias, labels, weights = arrays(3)

    def gradients(f):
        return jax.grad(lambda p: (f(p[0], p[1], labels, bias=p[2]) * weights).sum())

    @functools.partial(jax.jit, static_argnums=0)
    def hessian_times(f, vector):
        if outer is jax.jvp:
            return jax.jvp(gradients(f), ((x, kernel, bias),), (vector,))[1]
        return jax.vjp(gradients(f), (x, kernel, bias))[1](vector)[0]

    options = {"soft_cap": 2.0, "z_loss": 0.1, "smoothing": 0.1}
    vector = arrays(3, seed=1)[:3]
    got = hessian_times(functools.partial(linear_cross_entropy, chunk=8, **options), vector)
    want = hessian_times(functools.partial(reference_losses, **options), vector)
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)


def test_rejects_forward_mode():
    x, kernel, _, labels, _ = arrays(3, dtype=jnp.float32)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda x: linear_cross_entropy(x, kernel, labels), (x,), (x,))


def test_recompute_saves_the_logsumexp_and_does_not_rerun_the_forward_loop():
    x, kernel, _, labels, _ = arrays(3, dtype=jnp.float32)

    def loss(x, kernel):
        return linear_cross_entropy(x, kernel, labels, chunk=8).sum()

    loops = [
        str(jax.make_jaxpr(jax.grad(f, argnums=(0, 1)))(x, kernel)).count(" scan[")
        for f in (loss, recompute(loss), jax.checkpoint(loss))
    ]
    assert loops == [2, 2, 3]


def mesh(shape, names, axis_type=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(axis_type,) * len(names))


@functools.cache
def single_device():
    """Arguments [4, 8, ...] with a mask, and their losses and gradients on one device."""
    x, kernel, bias, labels, weights = arrays(4, 8)
    mask = jnp.arange(8)[None] < jnp.asarray([[8], [3], [0], [5]])
    arguments = (x, kernel, bias, labels, mask, weights)
    return arguments, losses_and_gradients(*arguments)


@jax.jit
def losses_and_gradients(x, kernel, bias, labels, mask, weights):
    return value_and_gradients(
        linear_cross_entropy, labels, weights, mask=mask, chunk=8, z_loss=0.01
    )(x, kernel, bias)


@pytest.mark.parametrize(
    ("spec", "axis_type"),
    [
        (P(("a", "b")), AxisType.Auto),
        (P("a", "b"), AxisType.Auto),
        (P("a", "b"), AxisType.Explicit),
    ],
)
@pytest.mark.usefixtures("float64")
def test_sharded_tokens_under_jit_match_one_device(spec, axis_type):
    arguments, want = single_device()
    devices = mesh((2, 2), ("a", "b"), axis_type)
    rows, copies = NamedSharding(devices, spec), NamedSharding(devices, P())
    sharded = jax.device_put(arguments, (rows, copies, copies, rows, rows, rows))
    compiled = losses_and_gradients.lower(*sharded).compile()
    got = compiled(*sharded)
    assert got[0].sharding.is_equivalent_to(rows, 2)
    assert got[1][0].sharding.is_equivalent_to(rows, 3)
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)
    assert "all-gather" not in compiled.as_text()


@pytest.mark.usefixtures("float64")
def test_kernel_sharded_over_the_vocabulary_under_jit_has_correct_gradients():
    x, kernel, bias, labels, weights = arrays(8, vocabulary=36)
    f = value_and_gradients(linear_cross_entropy, labels, weights, chunk=8)
    want = f(x, kernel, bias)
    vocabulary = NamedSharding(mesh((4,), ("a",)), P(None, "a"))
    got = f(x, jax.device_put(kernel, vocabulary), bias)
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)


def test_rejects_kernel_explicitly_sharded_over_the_vocabulary():
    x, kernel, _, labels, _ = arrays(8, dtype=jnp.float32, vocabulary=36)
    devices = mesh((4,), ("a",), AxisType.Explicit)
    kernel = jax.device_put(kernel, NamedSharding(devices, P(None, "a")))
    with pytest.raises(
        ValueError, match=r"kernel must not be sharded over the vocabulary, got 'a'"
    ):
        linear_cross_entropy(x, kernel, labels)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.usefixtures("float64")
def test_gradients_inside_shard_map_are_summed_over_devices(check_vma):
    (x, kernel, bias, labels, mask, weights), want = single_device()
    rows = P("a")

    def f(x, kernel, labels, *, bias, mask):
        def per_device(x, kernel, labels, bias, mask):
            return linear_cross_entropy(
                x, kernel, labels, bias=bias, mask=mask, chunk=8, z_loss=0.01
            )

        return jax.shard_map(
            per_device,
            mesh=mesh((4,), ("a",)),
            in_specs=(rows, P(), rows, P(), rows),
            out_specs=rows,
            check_vma=check_vma,
        )(x, kernel, labels, bias, mask)

    got = value_and_gradients(f, labels, weights, mask=mask)(x, kernel, bias)
    chex.assert_trees_all_close(got, want, rtol=1e-10, atol=1e-12)
