"""Mixture of experts: each position passes a few of many feed-forward layers."""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float, Int

from fnet import checks
from fnet.layer import Children, Layer, Params, State, composite, init_children, serial
from fnet.layers import activations
from fnet.layers.dense import HE_NORMAL, dense
from fnet.layers.norm import expand_like
from fnet.precision import add, multiply, upcast

Scores = Literal["softmax", "softmax_of_chosen", "sigmoid"]
"""How a router turns logits into scores."""

_BLOCK = 128  # rows at most that one product of an expert multiplies
_SAVED = "fnet_experts"


class Router(NamedTuple):
    """How a router chooses experts for a position, and weights them.

    Attributes:
      scores: ``softmax`` over all experts, ``softmax_of_chosen`` over the chosen ones, or
        ``sigmoid`` of each logit.
      normalize: Whether the scores of the chosen experts are divided by their sum.
      scale: Factor of the scores.
      bias: Whether logits have a bias.
      choice_bias: Whether experts are chosen by their scores plus a bias, which has no gradient
        (Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts").
      epsilon: What is added to the sum by which scores are divided.
      expert_scale: Whether each expert has a trained factor of its scores.
    """

    scores: Scores = "softmax"
    normalize: bool = False
    scale: float = 1.0
    bias: bool = False
    choice_bias: bool = False
    epsilon: float = 1e-20
    expert_scale: bool = False


def experts(
    width: int,
    hidden: int,
    count: int,
    chosen: int,
    *,
    router: Router = Router(),  # noqa: B008 (it is immutable)
    activation: str = "silu",
    fused: bool = False,
    bias: bool = False,
    clamp: float | None = None,
    up_offset: float = 0.0,
    shared: Layer | None = None,
    shared_gate: bool = False,
    norm: Layer | None = None,
    router_norm: Layer | None = None,
    post_norm: Layer | None = None,
) -> Layer:
    """Mixture of experts, without dropped positions: ``y = sum_i s_i expert_i(x)``.

    Shazeer et al. 2017, "Outrageously Large Neural Networks". A router scores all experts for each
    position, and only the best ``chosen`` compute: ``expert(x) = (act(x Wg) * (x Wu)) Wd``.

    Positions are sorted by expert, for each example alone, so that no loss depends on other
    examples. A loop multiplies blocks of positions of one expert each, which computes at most 1.5
    times the rows that are needed. `jax.lax.ragged_dot` computes all experts for all positions on
    CPUs, and in JAX 0.10 on GPUs, too. The backward pass saves ``x Wg`` and ``x Wu`` of the chosen
    experts.

    Args:
      width: D, size of the last axis of input and output.
      hidden: hidden width of an expert.
      count: E, number of experts.
      chosen: experts of a position.
      router: how they are chosen and weighted.
      activation: name of an activation, as for `fnet.layers.activation`.
      fused: whether one array holds the gates and what they multiply.
      bias: whether experts have biases.
      clamp: limit of gates from above, and of what they multiply from both sides (OpenAI 2025,
        "gpt-oss-120b & gpt-oss-20b Model Card"); None: no limit.
      up_offset: added to ``x Wu``.
      shared: a layer [..., D] -> [..., D] that computes every position, and is added; None: none.
      shared_gate: whether its output is multiplied by the sigmoid of a dense layer of the input.
      norm, router_norm, post_norm: layers without state before the experts, before the router, and
        of the weighted sum of experts, [..., T, D] -> [..., T, D]; None: none.

    Returns:
      A layer, [..., T, D] -> [..., T, D]. Its params are ``router`` with kernel [D, E], perhaps
      ``bias``, ``choice_bias`` and ``expert_scale`` [E]; ``experts``; the params of given layers,
      by their argument; and ``shared_gate``. Experts have ``gate`` and ``up`` with kernels [E, D,
      hidden], or ``expand`` [E, D, 2 hidden], and ``contract`` [E, hidden, D]. Biases are [E, ...].
      It has no state, but in training ``apply`` returns what `balance_loss` reads:
      ``probabilities`` [..., T, E] and ``chosen`` [..., T, chosen].

    Raises:
      ValueError: for sizes below 1, more ``chosen`` than experts, an unknown activation or kind of
        scores, or a gate without a shared layer.

    Example:
      >>> import jax, jax.numpy as jnp, fnet
      >>> layer = fnet.layers.experts(8, 16, count=4, chosen=2)
      >>> params, _ = layer.init(jax.random.key(0))
      >>> jax.tree.map(jnp.shape, params["experts"]["contract"])
      {'kernel': (4, 16, 8)}
      >>> layer.apply(params, {}, jnp.ones((2, 5, 8)), train=True)[0].shape
      (2, 5, 8)
    """
    checks.sizes("experts", width=width, hidden=hidden, count=count, chosen=chosen)
    checks.choice("experts", get_args(Scores), scores=router.scores)
    if chosen > count:
        raise ValueError(f"experts: chosen must be at most count={count}, got {chosen}")
    if shared_gate and shared is None:
        raise ValueError("experts: shared_gate needs a shared layer, got none")
    act, param = activations.get(activation).forward, activations.parameter_of(activation, None)
    sizes = {"expand": 2 * hidden} if fused else {"gate": hidden, "up": hidden}
    own = {name: _per_expert(count, width, n, bias) for name, n in sizes.items()}
    own["contract"] = _per_expert(count, hidden, width, bias)
    children = {"experts": serial(**own), "router": dense(width, count, bias=router.bias)}
    further = {"shared": shared, "norm": norm, "router_norm": router_norm, "post_norm": post_norm}
    children |= {name: layer for name, layer in further.items() if layer is not None}
    if shared_gate:
        children["shared_gate"] = dense(width, 1, bias=False)

    def init(key: Array) -> tuple[Params, State]:
        params, _ = init_children(children, key)
        if router.choice_bias:
            params["router"]["choice_bias"] = jnp.zeros(count, jnp.float32)
        if router.expert_scale:
            params["router"]["expert_scale"] = jnp.ones(count, jnp.float32)
        return params, {}

    def expert(params: Params, x: Float[Array, "n d"]) -> Float[Array, "n d"]:
        z = [checkpoint_name(_linear(x, params[name]), _SAVED) for name in sizes]
        gate, up = z if len(z) == 2 else jnp.split(z[0], 2, axis=-1)
        if clamp is not None:
            gate, up = jnp.minimum(gate, clamp), jnp.clip(up, -clamp, clamp)
        return _linear(act(gate, param) * (up + up_offset), params["contract"])

    def of_example(
        params: Params,
        x: Float[Array, "t d"],
        scores: Float[Array, "t k"],
        index: Int[Array, "t k"],
    ) -> Float[Array, "t d"]:
        y = _by_expert(expert, params, count, x, index)
        return jnp.einsum("tkd,tk->td", upcast(y), upcast(scores)).astype(x.dtype)

    def apply(child: Children, x: Float[Array, "... t d"]) -> Float[Array, "... t d"]:
        checks.last_axis("experts", x, width)
        if x.ndim < 2:
            raise ValueError(f"experts: expected x [..., T, {width}], got {x.shape}")
        logits = child("router", upcast(child.optional("router_norm", x)))
        scores, index = _choose(router, logits, chosen, child.params["router"])
        parts = child.optional("norm", x), scores, index
        examples = [a.reshape(-1, *a.shape[-2:]) for a in parts]
        y = jax.vmap(functools.partial(of_example, child.params["experts"]))(*examples)
        y = child.optional("post_norm", y.reshape(x.shape))
        if shared is not None:
            z = child("shared", x)
            y = add(y, multiply(z, jax.nn.sigmoid(child("shared_gate", x))) if shared_gate else z)
        routing = {"probabilities": jax.nn.softmax(logits), "chosen": index}
        child.state = routing if child.train else {}
        return y

    return composite(children, apply, init=init)


def balance_loss(routing: list[dict[str, Array]], mask: Array | None = None) -> Float[Array, " b"]:
    """Load balancing loss of experts: ``E sum_e f_e P_e`` for each row of the batch.

    ``f_e`` is how often expert e is chosen per position, and ``P_e`` is the mean of its
    probability, both over the positions of a row and over layers (Fedus et al. 2021, "Switch
    Transformers", equations 4 to 6). transformers computes it over the whole batch: for one row
    the values are equal. Per row, the loss of an example does not depend on other examples.

    Args:
      routing: what layers of experts return as their state in training: one entry per layer, with
        the same number of experts.
      mask: [B, T], True for real tokens; None: all are.

    Returns:
      Losses [B], float32: ``chosen`` for a uniform router.

    Raises:
      ValueError: without layers.
    """
    if not routing:
        raise ValueError("balance_loss: expected the routing of layers of experts, got none")
    count = routing[0]["probabilities"].shape[-1]
    real = jnp.ones(routing[0]["chosen"].shape[:2]) if mask is None else mask.astype(jnp.float32)
    positions = jnp.maximum(real.sum(1), 1)[:, None] * len(routing)
    used, probability = (jnp.zeros((len(real), count), jnp.float32) for _ in range(2))
    for layer in routing:
        is_chosen = jax.nn.one_hot(layer["chosen"], count).sum(2)
        used += jnp.einsum("bt,bte->be", real, is_chosen)
        probability += jnp.einsum("bt,bte->be", real, layer["probabilities"])
    losses: Array = count * (used * probability / positions**2).sum(1)
    return losses


def _per_expert(count: int, n_in: int, n_out: int, bias: bool) -> Layer:

    def init(key: Array) -> tuple[Params, State]:
        layer = dense(n_in, n_out, bias=bias, kernel_init=HE_NORMAL)
        return jax.vmap(layer.init)(jax.random.split(key, count))

    def apply(*args: object, **kwargs: object) -> tuple[Array, State]:
        raise NotImplementedError  # experts apply their params themselves

    return Layer(init, apply)


def _linear(x: Array, params: Params) -> Array:
    y = x @ params["kernel"].astype(x.dtype)
    return add(y, params["bias"][None]) if "bias" in params else y


def _choose(
    router: Router, logits: Array, chosen: int, params: Params
) -> tuple[Float[Array, "... k"], Int[Array, "... k"]]:
    scores = logits
    if router.scores == "softmax":
        scores = jax.nn.softmax(logits)
    if router.scores == "sigmoid":
        scores = jax.nn.sigmoid(logits)
    ranked = scores
    if router.choice_bias:
        ranked = scores + expand_like(params["choice_bias"], scores)
    _, index = jax.lax.top_k(jax.lax.stop_gradient(ranked), chosen)
    scores = jnp.take_along_axis(scores, index, axis=-1)
    if router.scores == "softmax_of_chosen":
        scores = jax.nn.softmax(scores)
    if router.normalize:
        scores = scores / (scores.sum(-1, keepdims=True) + router.epsilon)
    if router.expert_scale:
        scores = scores * upcast(params["expert_scale"])[index]
    return scores * router.scale, index


def _by_expert(
    expert: Callable[[Params, Array], Array],
    params: Params,
    count: int,
    x: Float[Array, "t d"],
    index: Int[Array, "t k"],
) -> Float[Array, "t k d"]:
    """Apply the chosen experts to each row, in blocks of rows that have the same expert."""
    t, k = index.shape
    rows = t * k
    size = max(1, min(_BLOCK, rows // (2 * count)))
    # Each expert may have a block that is not full.
    blocks = (rows + (size - 1) * min(count, rows)) // size
    of_row = index.reshape(-1)
    order = jnp.argsort(of_row)
    rows_by_expert = (of_row[:, None] == jnp.arange(count)[None]).sum(0)
    blocks_by_expert = -(-rows_by_expert // size)
    first_row = jnp.cumsum(rows_by_expert) - rows_by_expert
    first_block = jnp.cumsum(blocks_by_expert) - blocks_by_expert
    sorted_experts = of_row[order]
    place = first_block[sorted_experts] * size + jnp.arange(rows) - first_row[sorted_experts]
    token_at = jnp.full(blocks * size, t).at[place].set(order // k)
    in_blocks = x.at[token_at].get(mode="fill", fill_value=0).reshape(blocks, size, -1)
    # Blocks after the last one that is used are computed for the last expert, and dropped.
    owner = (first_block[None] <= jnp.arange(blocks)[:, None]).sum(1) - 1

    # Without this, the backward pass would save the weights of each block.
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(_SAVED))
    def apply(params: Params, x: Array, number: Array) -> Array:
        return expert(jax.tree.map(lambda a: jnp.take(a, number, axis=0, mode="clip"), params), x)

    y = jax.lax.map(lambda block: apply(params, *block), (in_blocks, owner))
    place_of_row = jnp.zeros(rows, place.dtype).at[order].set(place)
    by_choice: Array = y.reshape(blocks * size, -1)[place_of_row]
    return by_choice.reshape(t, k, -1)
