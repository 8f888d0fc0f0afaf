"""What clipped sums refuse: wrong bounds, losses that are not one an example, examples that mix."""

import example_losses
import jax
import jax.numpy as jnp
import optax
import pytest
from example_losses import rows

import fnet
from fnet import layers
from fnet.autodiff.per_example.clipped import clipped_grad

as_users_write = pytest.fixture(autouse=True)(example_losses.as_users_write)

INFINITY = float("inf")
X = jnp.array([1.0, 4.0, 7.0])


def halves(p, x):
    return (p - x) ** 2 / 2


def coupled(p, x):
    with jax.named_scope("norm"):
        h = x @ p
        h = h - h.mean(0, keepdims=True)
    return rows(h)


def dropped_out(p, x, key):
    """What is known of random numbers is nothing; of what they leave out it is enough."""
    h = jnp.where(jax.random.bernoulli(key, 0.5, (len(x), 2)), x @ p, 0)
    return rows(h - h.mean(0, keepdims=True))


def noisy(p, x, key):
    return coupled(p, x + jax.random.normal(key, x.shape))


def divided_again(p, x):
    h = (x.reshape(-1, 2) @ p).reshape(x.shape)
    return rows(h - h.mean((0, 1), keepdims=True))


def contrastive(p, x):
    """Of a batch of one it would be 0, and so would the gradient."""
    h = x @ p
    with jax.named_scope("pairs"):
        similar = h @ h.T
    return optax.losses.softmax_cross_entropy(similar, jnp.eye(len(x)))


def distances(p, x):
    h = x @ p
    return rows(jnp.square(h[:, None] - h[None]))


@jax.custom_vjp
def shortened(x):
    return x


shortened.defvjp(
    lambda x: (x, None), lambda _, ct: (ct / jnp.maximum(1, jnp.linalg.norm(ct)),)
)  # of all examples' cotangents together


@jax.custom_jvp
def centred(x):
    return x


centred.defjvp(lambda primals, tangents: (primals[0], tangents[0] - tangents[0].mean(0)))


def coupled_late(p, x):
    """What mixes examples reaches the result two rounds later."""

    def step(carry, _):
        new, old = carry
        return (x @ p + old.sum(0), new), None

    return rows(jax.lax.scan(step, (jnp.zeros_like(x), jnp.zeros_like(x)), length=5)[0][1])


REFUSED = {
    "nan": (lambda: clipped_grad(halves, float("nan")), "clip must be >= 0, got nan"),
    "negative": (lambda: clipped_grad(halves, -1.0), "clip must be >= 0, got -1.0"),
    "nothing": (lambda: clipped_grad(halves, 0), "rescale_to_unit_norm=True"),
    "everything": (
        lambda: clipped_grad(halves, INFINITY, rescale_to_unit_norm=True), "must be finite with rescale_to_unit_norm=True, got inf"
    ),
    "automatic": (lambda: clipped_grad(halves, INFINITY, automatic=0.01), "must be finite with automatic, got inf"),
    "bounds": (lambda: clipped_grad(halves, {"a": 1.0}), "per_layer=True"),
    "width": (
        lambda: clipped_grad(halves, 1.0, width=0)(jnp.float32(1), X), "width must be at least 1, got 0"
    ),
    "mean": (
        lambda: clipped_grad(lambda p, x: halves(p, x).mean(), 1.0)(jnp.float32(1), X),
        r"got \(\); return the losses themselves",
    ),
    "aux": (
        lambda: clipped_grad(lambda p, x: (halves(p, x), x), 1.0)(jnp.float32(1), X),
        "got tuple; without has_aux=True return the losses alone",
    ),
    "no bounds": (
        lambda: clipped_grad(halves, None, per_layer=True)(jnp.float32(1), X),
        "must be a number or a tree that is a prefix of params",
    ),
    "sizes": (
        lambda: clipped_grad(lambda p, x, y: p * x, 1.0)(jnp.float32(1), X, X[:2]),
        r"argument 1: \(3,\), argument 2: \(2,\)",
    ),
    "keys": (
        lambda: clipped_grad(lambda p, x, k: p * x, 1.0)(
            jnp.float32(1), X, jax.random.split(jax.random.key(0), 2)
        ),
        r"argument 1: \(3,\), argument 2: \(2,\)",
    ),
    "a raw key": (
        lambda: clipped_grad(lambda p, x, k: p * x, 1.0)(jnp.float32(1), X, jax.random.PRNGKey(0)),
        r"argument 2: \(2,\); a raw key is an array like others: give jax.random.key\(seed\)",
    ),
    "closure": (
        lambda: clipped_grad(lambda p, x: (p * jax.lax.top_k(x, 2)[0]).sum(-1) * X, 1.0)(
            jnp.float32(1), jnp.ones((3, 2))
        ),
        r"for a batch of one, got \(3,\); .* not by closure",
    ),
    "a row of params an example": (
        lambda: clipped_grad(lambda p, x: rows(x + p), 1.0)(jnp.ones((3, 2)), jnp.ones((3, 2))),
        r"for a batch of one, got \(3,\); .* not by closure or in params",
    ),
    "mask": (
        lambda: clipped_grad(halves, 1.0)(jnp.float32(1), X, mask=X[:2]), r"shape \[3\], got \(2,\)"
    ),
    "coupled": (
        lambda: clipped_grad(coupled, 1.0)(jnp.ones((2, 2)), jnp.ones((4, 2))),
        "norm mixes the examples.*reduce_sum.*group norm",
    ),
    "coupled late": (
        lambda: clipped_grad(coupled_late, 1.0)(jnp.ones((2, 2)), jnp.ones((4, 2))),
        "the loss mixes the examples.*reduce_sum",
    ),
    "contrastive": (
        lambda: clipped_grad(contrastive, 1.0)(jnp.ones((2, 2)), jnp.ones((4, 2))),
        "pairs mixes the examples.*dot_general",
    ),
    "backwards": (
        lambda: clipped_grad(lambda p, x: rows(shortened(x @ p)), 1.0)(
            jnp.ones((2, 2)), jnp.ones((4, 2))
        ),
        "the loss mixes the examples.*reduce_sum, in the backward pass",
    ),
    "a rule forwards": (
        lambda: clipped_grad(lambda p, x: rows(centred(x @ p)), 1.0)(
            jnp.ones((2, 2)), jnp.ones((4, 2))
        ),
        "the loss mixes the examples.*reduce_sum, in the backward pass",
    ),
    **{
        loss.__name__: (
            lambda loss=loss: clipped_grad(loss, 1.0)(
                jnp.ones((2, 2)), jnp.ones((4, 2)), jax.random.key(0)
            ),
            r"mixes the examples of a batch \(reduce_sum\)",
        )
        for loss in (dropped_out, noisy)
    },
    "divided again": (
        lambda: clipped_grad(divided_again, 1.0)(jnp.ones((2, 2)), jnp.ones((4, 3, 2))),
        r"mixes the examples of a batch \(reduce_sum\)",
    ),
    "reversed": (
        lambda: clipped_grad(lambda p, x: rows(x @ p * (x @ p)[::-1]), 1.0)(
            jnp.ones((2, 2)), jnp.ones((4, 2))
        ),
        r"mixes the examples of a batch \(rev\)",
    ),
    "sorted": (
        lambda: clipped_grad(lambda p, x: rows(jnp.sort(x @ p, 0)), 1.0)(
            jnp.ones((2, 2)), jnp.ones((4, 2))
        ),
        r"mixes the examples of a batch \(sort\)",
    ),
    "distances": (
        lambda: clipped_grad(distances, 1.0)(jnp.ones((2, 2)), jnp.ones((4, 2))),
        "the loss mixes the examples.*sub",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_named(name):
    wrong, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        wrong()


def test_batch_norm_is_refused_by_its_name():
    model = fnet.serial(conv=layers.conv(2, 4), norm=layers.abn(4), pool=layers.global_avg_pool())
    params, state = model.init(jax.random.key(0))

    def loss(p, x):
        return rows(model.apply(p, state, x, train=True)[0])

    with pytest.raises(ValueError, match="norm mixes the examples of a batch"):
        clipped_grad(loss, 1.0)(params, jnp.ones((4, 5, 5, 2)))


@pytest.mark.parametrize("dtype", ["int32", "complex64"])
@pytest.mark.parametrize("function", [lambda f: clipped_grad(f, 1.0), fnet.per_example_grad])
def test_losses_that_have_no_gradient_are_refused(function, dtype):
    with pytest.raises(TypeError, match=f"losses that are real and floating, got {dtype}"):
        function(lambda p, x: halves(p, x).astype(dtype))(jnp.float32(1), X)


def test_a_loss_that_gives_nothing_beside_is_refused_where_that_is_asked_for():
    with pytest.raises(
        TypeError, match=r"has_aux=True expects a loss that returns \(losses, aux\), got "
    ):
        clipped_grad(halves, 1.0, has_aux=True)(jnp.float32(1), X)


def test_integer_parameters_are_refused():
    with pytest.raises(TypeError, match=r"got int32 at \['n'\]"):
        clipped_grad(lambda p, x: p["n"] * x, 1.0)({"n": jnp.int32(1)}, X)
