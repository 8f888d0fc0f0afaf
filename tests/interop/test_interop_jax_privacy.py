"""`fnet.interop.jax_privacy` equals a loop over examples, and keeps the promises of its docstring."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fnet
from fnet.interop.jax_privacy import clipped_grad
from fnet.memory import peak

B = 6
PARAMS = {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3), "b": np.ones(3, np.float32)}
X = np.random.default_rng(0).standard_normal((B, 4)).astype(np.float32)
Y = np.arange(B) % 3


def loss(params, x, y, scale=1.0):
    logits = jnp.tanh(x @ params["w"] + params["b"][None])
    return scale * jnp.mean(fnet.losses.cross_entropy(logits, y))


def norm(tree):
    return np.sqrt(sum(np.square(np.asarray(a, np.float64)).sum() for a in jax.tree.leaves(tree)))


def per_example(clip=None, transform=lambda g: g, scale=lambda n, c: min(1, c / n)):
    """Gradients of single examples, scaled in numpy, and their norms."""
    grads = [jax.grad(loss)(PARAMS, X[i : i + 1], Y[i : i + 1]) for i in range(B)]
    norms = np.array([norm(g) for g in grads])
    grads = [transform(g) for g in grads]
    if clip is None:
        return grads, norms
    return [
        jax.tree.map(lambda a, g=g: np.asarray(a) * scale(norm(g), clip), g) for g in grads
    ], norms


def total(grads):
    return jax.tree.map(lambda *a: np.sum(a, 0), *grads)


GRADS, NORMS = per_example()
CLIP = float(np.median(NORMS))


@pytest.mark.parametrize(("microbatch_size", "materialized"), [(3, False), (None, True)])
def test_sum_equals_a_loop_over_examples(microbatch_size, materialized):
    gradient = jax.jit(
        clipped_grad(
            loss, batch_argnums=(1, 2), l2_clip_norm=CLIP, microbatch_size=microbatch_size,
            return_values=True, return_grad_norms=True,
            pre_clipping_transform=(lambda g: g) if materialized else None,
        )
    )  # fmt: skip
    expected, _ = per_example(CLIP)
    sums, aux = gradient(PARAMS, X, Y)
    chex.assert_trees_all_close(sums, total(expected), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(aux.grad_norms, NORMS, rtol=2e-5)
    values = [loss(PARAMS, X[i : i + 1], Y[i : i + 1]) for i in range(B)]
    np.testing.assert_allclose(aux.values, values, rtol=2e-5)
    assert aux.aux is None
    is_padding = np.arange(B) >= 4
    sums, aux = gradient(PARAMS, X, Y, is_padding_example=is_padding)
    chex.assert_trees_all_close(sums, total(expected[:4]), rtol=2e-5, atol=1e-6)


def test_gradients_are_not_materialized():
    params = {"w": jnp.ones((256, 256)), "b": jnp.ones(256)}
    x, y = jnp.ones((64, 256)), jnp.zeros(64, int)
    gradient = clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=1.0)
    temporaries = peak(jax.jit(gradient).lower(params, x, y).compile()).temporaries
    assert temporaries < 64 * params["w"].nbytes / 8


@pytest.mark.slow
def test_arguments_by_number():
    def weighted(x, scale, w, b, y):
        return loss({"w": w, "b": b}, x, y, scale)

    gradient = clipped_grad(weighted, (2, 3), batch_argnums=(0, 4), l2_clip_norm=CLIP)
    expected = total(per_example(CLIP)[0])
    sums = gradient(X, 1.0, PARAMS["w"], PARAMS["b"], Y)
    chex.assert_trees_all_close(sums, (expected["w"], expected["b"]), rtol=2e-5, atol=1e-6)
    bounds = (CLIP / 2, CLIP)
    gradient = clipped_grad(
        weighted, (2, 3), batch_argnums=(0, 4), l2_clip_norm=bounds, return_grad_norms=True
    )
    sums, aux = gradient(X, 1.0, PARAMS["w"], PARAMS["b"], Y)
    for name, bound, got, norms in zip("wb", bounds, sums, aux.grad_norms, strict=True):
        scaled = [g[name] * min(1, bound / norm(g[name])) for g in GRADS]
        chex.assert_trees_all_close(got, np.sum(scaled, 0), rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(norms, [norm(g[name]) for g in GRADS], rtol=2e-5)


def test_bounds_may_be_a_prefix_of_params():
    bounds = {"w": CLIP, "b": CLIP / 2}
    gradient = clipped_grad(
        loss, batch_argnums=(1, 2), l2_clip_norm=bounds, rescale_to_unit_norm=True, return_grad_norms=True
    )  # fmt: skip
    sums, aux = gradient(PARAMS, X, Y)
    for name, bound in bounds.items():
        scaled = [g[name] / max(norm(g[name]), bound) for g in GRADS]
        chex.assert_trees_all_close(sums[name], np.sum(scaled, 0), rtol=2e-5, atol=1e-6)
        np.testing.assert_allclose(aux.grad_norms[name], [norm(g[name]) for g in GRADS], rtol=2e-5)
    np.testing.assert_allclose(gradient.sensitivity(), 2**0.5)


@pytest.mark.slow
def test_users_with_several_examples():
    users = X.reshape(2, 3, 4), Y.reshape(2, 3)
    gradient = clipped_grad(loss, batch_argnums=(1, 2), keep_batch_dim=False, l2_clip_norm=0.1)
    grads = [jax.grad(loss)(PARAMS, x, y) for x, y in zip(*users, strict=True)]
    scaled = [jax.tree.map(lambda a, g=g: a * min(1, 0.1 / norm(g)), g) for g in grads]
    chex.assert_trees_all_close(gradient(PARAMS, *users), total(scaled), rtol=2e-5, atol=1e-6)


def test_keyword_arguments_have_one_row_per_example():
    def scaled(params, x, *, y, scale):
        return loss(params, x, y[None], scale)

    scales = np.linspace(0, 1, B, dtype=np.float32)
    sums = clipped_grad(scaled, l2_clip_norm=1e3)(PARAMS, X, y=Y, scale=scales)
    expected = [jax.tree.map(lambda a, s=s: a * s, g) for g, s in zip(GRADS, scales, strict=True)]
    chex.assert_trees_all_close(sums, total(expected), rtol=2e-5, atol=1e-6)


def test_a_random_key_is_split():
    def noisy(params, x, keys):
        return jnp.mean(x @ params * jax.random.normal(keys["noise"], ()))

    key = jax.random.key(3)
    gradient = clipped_grad(noisy, l2_clip_norm=1e3, prng_argnum=2)
    noise = jax.vmap(lambda k: jax.random.normal(k, ()))(jax.random.split(jax.random.key(3), B))
    np.testing.assert_allclose(gradient(jnp.ones(4), X, {"noise": key}), noise @ X, rtol=1e-5)


@pytest.mark.parametrize("pre_clipping_transform", [None, lambda g: g])
def test_aux_has_one_row_per_example(pre_clipping_transform):
    def with_aux(params, x):
        return jnp.sum(x @ params), {"x": x, "count": jnp.int32(len(x)), "row": x[0]}

    gradient = clipped_grad(
        with_aux, has_aux=True, l2_clip_norm=1.0, pre_clipping_transform=pre_clipping_transform
    )
    _, aux = gradient(jnp.ones(4), X)
    chex.assert_trees_all_equal(aux.aux, {"x": X, "count": np.ones(B, np.int32), "row": X})
    assert aux.values is None
    assert aux.grad_norms is None


def test_aux_may_be_slices_of_the_data():
    def with_aux(p, x):
        return p * jnp.sum(x), (x[:, 0, 0], x[:, :, 0], jnp.sum(x))

    x = np.random.default_rng(1).standard_normal((B, 2, 3)).astype(np.float32)
    _, aux = clipped_grad(with_aux, has_aux=True, l2_clip_norm=1.0)(1.0, x)
    chex.assert_trees_all_close(aux.aux, (x[:, 0, 0], x[:, :, 0], x.sum((1, 2))), rtol=1e-5)


def test_transforms_before_clipping():
    gradient = clipped_grad(
        loss, batch_argnums=(1, 2), l2_clip_norm=CLIP, return_grad_norms=True,
        pre_clipping_transform=lambda g: [2 * g["w"], jnp.sign(g["b"])],
    )  # fmt: skip
    expected, _ = per_example(CLIP, lambda g: [2 * g["w"], jnp.sign(g["b"])])
    sums, aux = gradient(PARAMS, X, Y)
    chex.assert_trees_all_close(sums, total(expected), rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(aux.grad_norms, NORMS, rtol=2e-5)  # Before the transform.


def test_sharding_constraints_see_the_batch_axis():
    mesh = jax.make_mesh((2,), ("data",))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def constrained(params, x, y):
        return loss(params, jax.lax.with_sharding_constraint(x, spec), y)

    gradient = clipped_grad(
        constrained, batch_argnums=(1, 2), l2_clip_norm=CLIP, spmd_axis_name="data"
    )
    sums = jax.jit(gradient)(PARAMS, X, Y)
    chex.assert_trees_all_close(sums, total(per_example(CLIP)[0]), rtol=2e-5, atol=1e-6)
    traced = str(jax.make_jaxpr(gradient)(PARAMS, X, Y))
    assert "UnconstrainedSpec" in traced or "'data'" in traced


GRID = {"batch_argnums": (1, 2), "l2_clip_norm": CLIP, "grid_scale": 1000}


@pytest.mark.usefixtures("float64")
def test_sums_on_a_grid_are_those_of_rounded_gradients():
    gradient = clipped_grad(loss, **GRID)
    step, elements = CLIP / 1000, 15
    bound = CLIP - elements**0.5 * step / 2
    scaled, _ = per_example(bound)
    expected = total(
        [jax.tree.map(lambda a: np.round(a / step).astype(np.int64), g) for g in scaled]
    )
    sums = jax.jit(gradient)(PARAMS, X, Y)
    chex.assert_trees_all_equal_shapes_and_dtypes(sums, expected)
    chex.assert_trees_all_close(sums, expected, atol=1)  # Rounding of ties.
    assert gradient.sensitivity() == 1000.0


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_sums_on_a_grid_are_within_the_bound():
    gradient = jax.jit(clipped_grad(loss, **GRID))
    for i in range(B):
        assert norm(gradient(PARAMS, X[i : i + 1], Y[i : i + 1])) <= 1000
    with pytest.raises(ValueError, match=r"must be above sqrt\(elements\) / 2 = 1.936 .* got 1"):
        clipped_grad(loss, **GRID | {"grid_scale": 1})(PARAMS, X, Y)
    bad = X.copy()
    bad[2] = np.nan
    chex.assert_trees_all_close(
        gradient(PARAMS, bad, Y), gradient(PARAMS, X, Y, is_padding_example=np.arange(B) == 2)
    )


@pytest.mark.parametrize("microbatch_size", [None, 256])
def test_sums_in_bfloat16_are_accumulated_in_float32(microbatch_size):
    params, x = jnp.zeros(1, jnp.bfloat16), jnp.ones((1024, 1), jnp.bfloat16)

    def first(params, x):
        return jnp.sum(x * params[None])

    how = {"l2_clip_norm": 1.004, "microbatch_size": microbatch_size}
    total = clipped_grad(first, **how)(params, x[:768])
    assert total.dtype == jnp.float32
    assert total[0] == 768
    with pytest.warns(UserWarning, match="rounded to bfloat16 may move by more than sensitivity"):
        gradient = clipped_grad(first, dtype=jnp.bfloat16, **how)
    total = gradient(params, x)
    assert total.dtype == jnp.bfloat16
    assert total[0] == 1024


@pytest.mark.parametrize("nan_safe", [True, False])
def test_gradients_that_are_not_finite(nan_safe):
    bad = X.copy()
    bad[2, 0] = np.inf
    gradient = clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=CLIP, nan_safe=nan_safe)
    expected, _ = per_example(CLIP)
    expected = total(expected[:2] + expected[3:])
    if not nan_safe:
        expected = jax.tree.map(lambda a: np.full_like(a, np.nan), expected)
    chex.assert_trees_all_close(gradient(PARAMS, bad, Y), expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("rescale", [False, True])
def test_sum_and_sensitivity_are_divided(rescale):
    how = {"batch_argnums": (1, 2), "l2_clip_norm": CLIP, "rescale_to_unit_norm": rescale}
    gradient = clipped_grad(loss, **how, normalize_by=4.0)
    whole = clipped_grad(loss, **how)
    chex.assert_trees_all_close(
        gradient(PARAMS, X, Y), jax.tree.map(lambda a: a / 4, whole(PARAMS, X, Y))
    )
    assert whole.sensitivity() == (1.0 if rescale else CLIP)
    assert gradient.sensitivity("ADD_OR_REMOVE_ONE") == whole.sensitivity() / 4
    assert gradient.sensitivity("REPLACE_ONE") == whole.sensitivity() / 2
    assert gradient.l2_norm_bound == gradient.sensitivity()


INVALID = {
    "overlap": ({"batch_argnums": 0}, r"\(0,\) and batch_argnums \(0,\) overlap in \[0\]"),
    "no batch": ({"batch_argnums": ()}, "Batch Argnums must not be empty"),
    "negative number": ({"argnums": -1}, "must be >= 0, got"),
    "normalize_by": ({"normalize_by": 0.0}, "normalize_by must be > 0, got 0.0"),
    "negative clip": ({"l2_clip_norm": -1.0}, "clip must be >= 0, got -1.0"),
    "grid without x64": ({"grid_scale": 9}, "64-bit"),
    "rescaled grid": ({"grid_scale": 9, "rescale_to_unit_norm": True}, "grid_scale needs a number"),
    "microbatches": ({"microbatch_size": 4}, "6 examples must be divisible by microbatch_size, got 4"),
    "sizes": ({"batch_argnums": (1, 2, 3)}, r"same size along axis 0, got shapes \[\(6, 4\), \(6,\), \(1,\)\]"),
}  # fmt: skip


def test_rejects_invalid_arguments():
    for name in INVALID:
        how, message = INVALID[name]
        with pytest.raises(ValueError, match=message):
            clipped_grad(loss, **{"batch_argnums": (1, 2), "l2_clip_norm": 1.0} | how)(
                PARAMS, X, Y, np.ones(1)
            )


@pytest.mark.parametrize("is_padding", [np.zeros(5, bool), np.zeros(B, np.float32)])
def test_rejects_padding_that_is_not_a_row_of_bools(is_padding):
    with pytest.raises(ValueError, match=r"is_padding_example must be bool with shape \[6\], got"):
        clipped_grad(loss, batch_argnums=(1, 2), l2_clip_norm=1.0)(
            PARAMS, X, Y, is_padding_example=is_padding
        )


def test_rejects_a_function_that_is_not_scalar():
    with pytest.raises(TypeError, match=r"fun must return a scalar, got shape \(1,\)"):
        clipped_grad(lambda p, x: x @ p, l2_clip_norm=1.0)(jnp.ones(4), X)
