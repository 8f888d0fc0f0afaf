"""TracIn, EK-FAC influence and TRAK against their equations with explicit gradients."""

import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fnet
from fnet.attribution import Scores, ekfac, fisher_diagonal, kfac, scores, tracin, trak

N, Q = 20, 3
trak_module = sys.modules["fnet.attribution.trak"]


def cnn(params, x):
    dims = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, params["kernel"], (2, 2), "SAME", dimension_numbers=dims)
    y = jnp.tanh(y + params["bias"][None, None, None]).reshape(len(x), -1)
    return y @ params["dense"]


def loss(params, x, y):
    return fnet.losses.cross_entropy(cnn(params, x), y)


def draw(seed):
    rng = np.random.default_rng(seed)
    shapes = {"kernel": (3, 3, 2, 4), "bias": (4,), "dense": (16, 3)}
    params = {n: jnp.asarray(0.3 * rng.normal(size=s), jnp.float32) for n, s in shapes.items()}

    def examples(n):
        x = jnp.asarray(rng.normal(size=(n, 4, 4, 2)), jnp.float32)
        return x, jnp.asarray(rng.integers(0, 3, n), jnp.int32)

    return params, examples(N), examples(Q)


def batches(train, size=10):
    x, y = train
    return [(x[i : i + size], y[i : i + size]) for i in range(0, N, size)]


@pytest.fixture
def _chunks(monkeypatch):
    monkeypatch.setattr(scores, "_CHUNK_BYTES", 3 * 4 * (72 + 4 + 48))


per_example = jax.jit(fnet.per_example_grad(loss))


@jax.jit
def flat_gradients(params, batch):
    flat, unflatten = jax.flatten_util.ravel_pytree(params)
    return jax.jacobian(lambda w: loss(unflatten(w), *batch))(flat)


@pytest.mark.usefixtures("_chunks")
def test_tracin_sums_inner_products_over_checkpoints():
    (first, train, queries), (second, _, _) = draw(0), draw(1)
    got = Scores.of(tracin(loss, [first, second], [0.5, 0.1], queries), batches(train, 8)).values
    expected = sum(
        rate * flat_gradients(p, train) @ flat_gradients(p, queries).T
        for p, rate in ((first, 0.5), (second, 0.1))
    )
    chex.assert_trees_all_close(got, np.asarray(expected), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["tracin", "ekfac"])
def test_the_average_of_queries_is_one_query(name):
    params, train, queries = draw(0)

    def scorer(**options):
        if name == "tracin":
            return tracin(loss, [params], [0.5], queries, **options)
        return ekfac(loss, params, [train], queries, **options)

    mean, each = (jax.jit(scorer(average=average))(*train) for average in (True, False))
    chex.assert_trees_all_close(mean, each.mean(1, keepdims=True), rtol=1e-3, atol=1e-5)


def test_rejects_missing_arguments():
    for call, message in (
        (lambda p, x, q: tracin(loss, [p], [0.1, 0.2], q), "one learning rate for each checkpoint, got 2 "),
        (lambda p, x, q: ekfac(loss, p, [x], q, damping=0), "damping must be > 0, got 0"),
        (lambda p, x, q: tracin(loss, [p], [0.1], (q[0][:0], q[1][:0])), "expected test examples in queries, got none"),
        (lambda p, x, q: ekfac(loss, p, [], q), "expected training examples in batches, got none"),
        (lambda p, x, q: trak(loss, [], [x], q, jax.random.key(0)), "trak: expected at least one checkpoint, got none"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call(*draw(0))


def block(covariances, squares_of, damping):
    """The inverse of a block of the curvature, as a dense matrix, from matrices [N, r, c]."""
    left, right = (np.linalg.eigh(a)[1] for a in covariances)
    basis = np.kron(left, right)
    values = np.square(squares_of @ basis).mean(0)
    return basis @ np.diag(1 / (values + damping * values.mean())) @ basis.T


@pytest.mark.usefixtures("_chunks")
def test_the_diagonal_of_the_fisher_matrix_is_the_mean_of_squares():
    params, train, _ = draw(0)
    grads = per_example(params, *train)
    expected = jax.tree.map(lambda g: np.square(g).mean(0), grads)
    got = fisher_diagonal(loss, params, batches(train))
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-7)


def test_factors_give_the_fisher_matrix_of_a_linear_network():
    """Labels with unit noise: cotangents are independent of the inputs, so K-FAC is exact."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)
    signs = jnp.asarray([[a, b] for a in (1.0, -1.0) for b in (1.0, -1.0)])
    rows, noise = (jnp.repeat(x, 4, 0), jnp.tile(signs, (6, 1)))

    def squared(w, x, noise):
        y = x @ w
        return 0.5 * jnp.square(y - jax.lax.stop_gradient(y) - noise).sum(-1)

    factors = kfac(squared, jnp.ones((3, 2)), [(rows, noise)])
    grads = fnet.per_example_grad(squared)(jnp.ones((3, 2)), rows, noise).reshape(24, 6)
    expected = grads.T @ grads / 24
    got = jnp.kron(factors.inputs[0], factors.cotangents[0])
    chex.assert_trees_all_close(got, expected, rtol=1e-4, atol=1e-5)


def test_factors_of_bfloat16_sequences_of_several_lengths():
    w, *xs = (jax.random.normal(jax.random.key(i), (4, 2 + i, 2)) for i in range(3))
    w, xs = w[0].astype(jnp.bfloat16), [x.astype(jnp.bfloat16) for x in xs]
    factors = kfac(lambda w, x: jnp.square(x @ w).sum((1, 2)), w, [(x,) for x in xs])
    rows = np.concatenate([x.reshape(-1, 2) for x in xs]).astype(np.float32)
    chex.assert_trees_all_close(factors.inputs[0], rows.T @ rows / len(rows), rtol=1e-3)
    assert factors.inputs.dtype == factors.cotangents.dtype == jnp.float32


def test_one_example_that_is_not_finite_hides_no_other():
    _, (x, y), queries = draw(0)
    bad, rest = (x.at[3].set(jnp.nan), y), (jnp.delete(x, 3, 0), jnp.delete(y, 3))
    kernel = draw(1)[0]["dense"]

    def loss(kernel, x, y):
        return fnet.losses.cross_entropy(x.reshape(len(x), -1)[:, :16] @ kernel, y)

    for scorer in (
        lambda *train: trak(loss, [kernel], [train], queries, jax.random.key(0), dim=4),
        lambda *train: ekfac(loss, kernel, [train], queries),
    ):
        got, expected = (jax.jit(scorer(*train))(*rest) for train in (bad, rest))
        chex.assert_trees_all_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("_chunks")
def test_ekfac_matches_dense_matrices():
    params, train, queries = draw(0)
    x, y = train

    @jax.jit
    def patches_and_cotangents():
        patches = jax.lax.conv_general_dilated_patches(
            x, (3, 3), (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )  # The order is [in, 3, 3].
        patches = patches.reshape(N, 4, 2, 9).swapaxes(2, 3).reshape(N, 4, 18)
        kernel = params["kernel"].reshape(18, 4)

        def of(tap, tap_logits):
            z = patches @ kernel + params["bias"][None, None] + tap
            hidden = jnp.tanh(z).reshape(N, 16)
            return fnet.losses.cross_entropy(hidden @ params["dense"] + tap_logits, y).sum()

        zeros = jnp.zeros((N, 4, 4)), jnp.zeros((N, 3))
        z = patches @ kernel + params["bias"][None, None]
        return patches, jnp.tanh(z).reshape(N, 16), *jax.grad(of, (0, 1))(*zeros)

    patches, hidden, of_conv, of_logits = map(np.asarray, patches_and_cotangents())
    grads, of_queries = (
        jax.tree.map(np.asarray, per_example(params, *b)) for b in (train, queries)
    )

    def rows(tree, name):
        return tree[name].reshape(len(tree[name]), -1)

    def covariance(a):
        a = a.reshape(-1, a.shape[-1])
        return a.T @ a

    damping, expected = 0.2, 0.0
    kernel, dense = (
        block(tuple(map(covariance, factors)), rows(grads, name), damping)
        for name, factors in (("kernel", (patches, of_conv)), ("dense", (hidden, of_logits)))
    )
    values = np.square(grads["bias"]).mean(0)
    bias = np.diag(1 / (values + damping * values.mean()))
    for name, inverse in (("kernel", kernel), ("dense", dense), ("bias", bias)):
        expected += rows(grads, name) @ inverse @ rows(of_queries, name).T
    factors = kfac(loss, params, batches(train))
    for name, u, v in (("kernel", patches, of_conv), ("dense", hidden, of_logits)):
        own = factors[name]
        positions = 4 if name == "kernel" else 1
        expected_factors = covariance(u) / (N * positions), covariance(v) / N
        chex.assert_trees_all_close(
            (own.inputs[0], own.cotangents[0]), expected_factors, rtol=1e-4, atol=1e-5
        )
    scorer = ekfac(loss, params, batches(train), queries, damping=damping)
    got = Scores.of(scorer, batches(train)).values
    chex.assert_trees_all_close(got, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())


def test_ekfac_takes_the_curvature_of_another_loss():
    params, train, queries = draw(0)

    def twice(params, x, y):
        return 2 * loss(params, x, y)

    plain = jax.jit(ekfac(loss, params, [train], queries))(*train)
    quarter = jax.jit(ekfac(loss, params, [train], queries, curvature_loss=twice))(*train)
    chex.assert_trees_all_close(quarter, plain / 4, rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("_chunks")
def test_trak_matches_its_equation():
    (first, train, queries), (second, _, _) = draw(0), draw(1)
    key, dim, damping = jax.random.key(3), 8, 0.1
    scorer = trak(loss, [first, second], batches(train), queries, key, dim=dim, damping=damping)
    got = Scores.of(scorer, batches(train)).values

    linear, doubts = [], []
    for number, params in enumerate((first, second)):
        size = sum(p.size for p in jax.tree.leaves(params))
        signs = scores_projection(size, jax.random.fold_in(key, number), dim)

        def margin(params, x, y):
            p = jnp.take_along_axis(jax.nn.softmax(cnn(params, x)), y[:, None], 1)[:, 0]
            return jnp.log(p) - jnp.log1p(-p), p

        def features(batch, params=params, signs=signs):
            rows = jax.jit(fnet.per_example_grad(margin, has_aux=True))(params, *batch)
            grads, p = rows
            flat = [np.asarray(g).reshape(len(p), -1) for g in jax.tree.leaves(grads)]
            return np.concatenate(flat, 1) @ signs, np.asarray(p)

        (phi, p), (phi_q, _) = features(train), features(queries)
        kernel = phi.T @ phi
        kernel += damping * np.trace(kernel) / dim * np.eye(dim)
        linear.append(phi @ np.linalg.solve(kernel, phi_q.T))
        doubts.append(1 - p)
    expected = np.mean(linear, 0) * np.mean(doubts, 0)[:, None]
    chex.assert_trees_all_close(got, expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())


def scores_projection(size, key, dim):
    signs = np.asarray(trak_module.random_projection(jnp.eye(size), key, dim))
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert abs(signs.mean()) < 0.1
    return signs


def test_random_projection_in_blocks(monkeypatch):
    monkeypatch.setattr(trak_module, "_BLOCK", 40)
    signs = scores_projection(23, jax.random.key(0), 16)  # Two rows at a time.
    assert len(np.unique(signs, axis=0)) == 23
    rows = np.random.default_rng(0).normal(size=(4, 23)).astype(np.float32)
    got = trak_module.random_projection(jnp.asarray(rows), jax.random.key(0), 16)
    chex.assert_trees_all_close(got, rows @ signs, rtol=1e-4, atol=1e-5)


def test_trak_stays_finite_where_a_loss_rounds_to_zero_or_all_features_are_zero():
    weights = jnp.array([[-1.0, 1.0], [0.0, 0.0]])
    x = jnp.array([[10.0, 0.0], [1.0, 0.5], [0.5, -1.0], [-0.5, 0.2]])
    y = jnp.array([1, 1, 0, 0])

    def losses(weights, x, y):
        return fnet.losses.cross_entropy(x @ weights, y)

    assert (losses(weights, x, y) == 0).tolist() == [True, False, False, False]

    @jax.jit
    def scores(train, queries):
        key = jax.random.key(0)
        return trak(losses, [weights], [train], queries, key, dim=4, damping=0.1)(*train)

    rows = x[1:], y[1:]
    expected = np.concatenate([np.zeros((1, 3)), scores(rows, rows)])
    np.testing.assert_allclose(scores((x, y), rows), expected, rtol=1e-4)
    assert not scores((0 * x, y), (0 * x, y)).any()


def test_top_of_a_query():
    values = Scores(np.array([[0.0, 3.0], [-2.0, 1.0], [1.0, 2.0], [0.5, -1.0], [0.1, np.nan]]))
    helpful, harmful = values.top(1, 2)
    assert helpful.tolist() == [0, 2]
    assert harmful.tolist() == [3, 1]
