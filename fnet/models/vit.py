"""Vision transformers (ViT): images as sequences of patches."""

import functools
from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float

from fnet import checks, layers
from fnet.layer import Children, Layer, Params, State, composite, init_children
from fnet.layers.dot_product_attention import dot_product_attention
from fnet.layers.feed_forward import feed_forward
from fnet.layers.layer_scale import layer_scale as layer_scale_layer
from fnet.layers.stack import Norm, resolve_norm
from fnet.precision import add, broadcast_like, upcast

Pooling = Literal["token", "tokens", "mean", "mean_of_norm", "token_and_mean", "map", "none"]
"""How tokens become features; see `image_transformer`."""

Positions = Literal["all", "class", "patches"]
"""Which tokens have a learned position; see `image_transformer`."""

Interpolation = Literal["bicubic", "bicubic_antialiased"]
"""How positions are interpolated to another image size; see `resize_positions`."""

VARIANTS = {
    f"vit_{size}": {"width": width, "blocks": blocks, "heads": heads}
    for size, width, blocks, heads in (  # Dosovitskiy et al. 2021; DeiT
        ("tiny", 192, 12, 3),
        ("small", 384, 12, 6),
        ("base", 768, 12, 12),
        ("large", 1024, 24, 16),
        ("huge", 1280, 32, 16),
    )
}
"""Options of the networks that `fnet.models.get` knows, by name."""


def vit(
    *,
    num_classes: int | None,
    image_shape: Sequence[int] = (224, 224, 3),
    patch: int = 16,
    width: int = 768,
    blocks: int = 12,
    heads: int = 12,
    hidden: int | None = None,
    registers: int = 0,
    pooling: Literal["token", "mean"] = "token",
    layer_scale: float | None = None,
    dropout: float = 0.0,
) -> Layer:
    """Vision transformer (Dosovitskiy et al. 2021, "An Image is Worth 16x16 Words").

    Patches, a class token and registers pass through blocks of attention and a feed-forward layer
    with GELU, each after a layer norm.

    Args:
      num_classes: number of logits. None: the network returns features [N, width].
      image_shape: (H, W, C). Patches that do not fit into H and W are cut off.
      patch: side of a patch in pixels.
      width: D, the size of a token.
      blocks: number of blocks.
      heads: number of attention heads; divides ``width``.
      hidden: width of the feed-forward layers. None: 4 width.
      registers: number of tokens that are neither image nor output (Darcet et al. 2024, "Vision
        Transformers Need Registers").
      pooling: ``token`` reads the class token, ``mean`` the mean of the patches. With ``mean``
        there is no class token.
      layer_scale: initial scale of each branch (Touvron et al. 2021); None: no scale.
      dropout: dropout rate of each branch in training.

    Returns:
      A layer on NHWC images, [N, H, W, C] -> [N, num_classes]; see `fnet.models.image_transformer`.

    Raises:
      ValueError: for a size below 1, an unknown pooling, or heads that do not divide the width;
        when applied, for another image shape.
    """
    checks.choice("vit", ("token", "mean"), pooling=pooling)
    hidden = 4 * width if hidden is None else hidden
    checks.sizes("vit", blocks=blocks, num_classes=num_classes)
    block = layers.Block(
        layers.attention(width, heads),
        feed_forward(width, hidden, activation="gelu_exact", gated=False, bias=True),
    )
    scale = functools.partial(layer_scale_layer, initial=layer_scale) if layer_scale else None
    return image_transformer(
        image_shape=image_shape,
        patch=patch,
        width=width,
        blocks=[block] * blocks,
        class_token=pooling == "token",
        registers=registers,
        post_norm=scale,
        pooling=pooling,
        head=None if num_classes is None else layers.dense(width, num_classes),
        dropout=dropout,
    )


def image_transformer(
    *,
    image_shape: Sequence[int],
    patch: int | tuple[int, int],
    width: int,
    blocks: Sequence[layers.Block],
    class_token: bool = True,
    distillation_token: bool = False,
    registers: int = 0,
    mask_token: bool = False,
    positions: Positions = "class",
    interpolate: Interpolation | None = None,
    patch_bias: bool = True,
    norm: Norm = layers.layer_norm,
    input_norm: bool = False,
    final_norm: bool = True,
    post_norm: Norm | None = None,
    pooling: Pooling = "token",
    map_pooling: Layer | None = None,
    head: Layer | None = None,
    dropout: float = 0.0,
) -> Layer:
    """Transformer on the patches of an image, with the options of published networks.

    With P the patches and p the learned positions, the network computes::

        x = stack([class token, distillation token, registers, P W + b + p]);   y = head(pool(x))

    Args:
      image_shape: (H, W, C).
      patch: side of a patch, or its height and width. Pixels beyond the last whole patch are not
        read.
      width: D, the size of a token.
      blocks: blocks as for `fnet.layers.stack`. Mixers must not be causal.
      class_token: whether there is a class token.
      distillation_token: whether a second one follows (Touvron et al. 2021, "Training
        data-efficient image transformers & distillation through attention").
      registers: number of further tokens.
      mask_token: whether there is a token for masked patches.
      positions: which tokens have positions: ``patches``, also the ``class`` and distillation
        tokens, or ``all``.
      interpolate: how positions are resized to images of another shape. None: such images are an
        error.
      patch_bias: whether the patch embedding has a bias.
      norm: norm before each mixer and each feed-forward layer, and of the output.
      input_norm: whether a norm precedes the blocks, as in CLIP.
      final_norm: whether a norm follows the blocks.
      post_norm: as for `fnet.layers.stack`, such as a layer scale.
      pooling: input of the head. ``token``: the class token. ``tokens``: class and distillation
        token [N, 2, D]. ``mean``: the mean of the patches, then the final norm. ``mean_of_norm``:
        the final norm, then the mean. ``token_and_mean``: both [N, 2 D], after the final norm.
        ``map``: ``map_pooling`` of all patches after the final norm. ``none``: all tokens
        [N, T, D].
      map_pooling: a layer [N, T, D] -> [N, D], such as `attention_pooling`.
      head: a layer on the pooled features; None: the features are the output.
      dropout: as for `fnet.layers.stack`.

    Returns:
      A layer on NHWC images. Its params are ``patches``, ``class_token`` [D],
      ``distillation_token`` [D], ``register_tokens`` [registers, D], ``mask_token`` [D],
      ``pos_embedding`` [positions, D], ``input_norm``, ``blocks``, ``norm``, ``pooling`` and
      ``head``. ``apply`` also takes ``masked`` [N, patches], True where the mask token replaces
      a patch (Bao et al. 2022, "BEiT").

    Raises:
      ValueError: for an unknown option, for a token that the pooling needs and that is not there;
        when applied, for another image shape, or ``masked`` without a mask token.

    Example:
      >>> import fnet, jax, jax.numpy as jnp
      >>> mixer, feed_forward = fnet.layers.attention(8, 2), fnet.layers.mlp([8, 8])
      >>> options = {"width": 8, "blocks": [fnet.layers.Block(mixer, feed_forward)]}
      >>> model = fnet.models.image_transformer(
      ...     image_shape=(8, 8, 3), patch=4, **options
      ... )
      >>> params, _ = model.init(jax.random.key(0))
      >>> features, _ = model.apply(params, {}, jnp.ones((2, 8, 8, 3)), train=False)
      >>> params["pos_embedding"].shape, features.shape
      ((5, 8), (2, 8))
    """
    patch = (patch, patch) if isinstance(patch, int) else patch
    checks.sizes("image_transformer", patch=min(patch), width=width, registers=registers + 1)
    where = "image_transformer"
    checks.choice(where, get_args(Pooling), pooling=pooling)
    checks.choice(where, get_args(Positions), positions=positions)
    checks.choice(where, (None, *get_args(Interpolation)), interpolate=interpolate)
    if pooling.startswith("token") and not class_token:
        raise ValueError(
            f"image_transformer: pooling {pooling!r} reads the class token; set class_token=True"
        )
    if (pooling == "map") != (map_pooling is not None):
        raise ValueError("image_transformer: give map_pooling with pooling='map', and only then")
    *size, channels = image_shape
    grid = size[0] // patch[0], size[1] // patch[1]
    if not min(grid):
        raise ValueError(f"image_transformer: patch {patch} is larger than the image {tuple(size)}")

    tokens = {  # in the order of the sequence
        "class_token": () if class_token else None,
        "distillation_token": () if distillation_token else None,
        "register_tokens": (registers,) if registers else None,
    }
    tokens_shapes = {name: (*n, width) for name, n in tokens.items() if n is not None}
    prefix = class_token + distillation_token + registers
    with_position = {"all": prefix, "class": prefix - registers, "patches": 0}[positions]

    norm_layer = resolve_norm("image_transformer", norm)
    children = {
        "patches": layers.conv(
            channels, width, patch, stride=patch, padding="VALID", bias=patch_bias
        ),
        "blocks": layers.stack(width, blocks, norm=norm, post_norm=post_norm, dropout=dropout),
    }
    optional = {
        "input_norm": norm_layer(width) if input_norm else None,
        "norm": norm_layer(width) if final_norm else None,
        "pooling": map_pooling,
        "head": head,
    }
    children |= {name: layer for name, layer in optional.items() if layer is not None}

    def init(key: Array) -> tuple[Params, State]:
        children_key, *keys = jax.random.split(key, 5)
        params, state = init_children(children, children_key)
        shapes = tokens_shapes | {"pos_embedding": (with_position + grid[0] * grid[1], width)}
        for name, shape in shapes.items():
            k = keys[list(shapes).index(name)]
            params[name] = 0.02 * jax.random.normal(k, shape, jnp.float32)
        if mask_token:
            params["mask_token"] = jnp.zeros(width, jnp.float32)
        return params, state

    def embed(params: Params, x: Array, patches: Array, masked: Array | None) -> Array:
        """Arrange tokens [N, T, D]: prefix, then patches [N, H', W', D], with positions."""
        n, rows, columns, _ = patches.shape
        patches = patches.reshape(n, rows * columns, width)
        if masked is not None:
            mask = jnp.reshape(masked, (n, -1, 1))
            patches = jnp.where(mask, broadcast_like(params["mask_token"], patches), patches)
        pos = upcast(params["pos_embedding"])
        pos_of_prefix, pos = pos[:with_position], pos[with_position:]
        if x.shape[1:3] != tuple(size):
            assert interpolate is not None
            pos = resize_positions(pos, grid, (rows, columns), interpolate)
        patches = add(patches, pos[None])
        if not prefix:
            return patches
        first = jnp.concatenate([upcast(jnp.atleast_2d(params[name])) for name in tokens_shapes])
        first = first.at[:with_position].add(pos_of_prefix)
        # Broadcast in float32, so that the gradient is summed over images in float32.
        first = jnp.broadcast_to(first, (n, prefix, width)).astype(patches.dtype)
        return jnp.concatenate([first, patches], axis=1)

    def apply(
        child: Children, x: Float[Array, "n h w c"], *, masked: Bool[Array, "n p"] | None = None
    ) -> Array:
        _check_image(x, (*size, channels), patch, interpolate)
        if masked is not None and not mask_token:
            raise ValueError("image_transformer: masked needs mask_token=True")

        with jax.named_scope("embed"):
            x = embed(child.params, x, child("patches", x), masked)
        x = child("blocks", child.optional("input_norm", x))
        return child.optional(
            "head", _pool(child, pooling, x, class_token + distillation_token, prefix)
        )

    return composite(children, apply, init=init)


def _pool(child: Children, pooling: Pooling, x: Array, classes: int, prefix: int) -> Array:
    """Read features of class tokens, other tokens up to ``prefix``, and patches."""
    norm = functools.partial(child.optional, "norm")
    match pooling:  # Only tokens that the head reads pass the final norm.
        case "token":
            return norm(x[:, 0])
        case "tokens":
            return norm(x[:, :classes])
        case "mean":
            return norm(_mean(x[:, prefix:]))
        case "mean_of_norm":
            return _mean(norm(x[:, prefix:]))
        case "token_and_mean":
            return jnp.concatenate([norm(x[:, 0]), _mean(norm(x[:, prefix:]))], axis=-1)
        case "map":
            return child("pooling", norm(x[:, prefix:]))
    return norm(x)


def attention_pooling(
    width: int,
    heads: int,
    feed_forward: Layer,
    *,
    norm: Norm = layers.layer_norm,
    fused: bool = True,
) -> Layer:
    """Pool tokens by attention from one learned query, followed by a feed-forward layer.

    Lee et al. 2019, "Set Transformer"; Zhai et al. 2022, "Scaling Vision Transformers"::

        a = softmax(q k^T / sqrt(d)) v W + b;   y = a + feed_forward(norm(a))

    [N, T, D] -> [N, D]. Params are ``probe`` [D], the input of the query, ``query_key_value``, or
    ``query`` and ``key_value`` unless fused; ``output``, ``norm`` and ``feed_forward``.
    """
    if heads < 1 or width % heads:
        raise ValueError(
            f"attention_pooling: heads must divide width, got heads={heads}, width={width}"
        )
    projections = {"query": layers.dense(width, width), "key_value": layers.dense(width, 2 * width)}
    children = {"query_key_value": layers.dense(width, 3 * width)} if fused else dict(projections)
    children["output"] = layers.dense(width, width)
    children["norm"] = resolve_norm("attention_pooling", norm)(width)
    children["feed_forward"] = feed_forward

    def init(key: Array) -> tuple[Params, State]:
        params, state = init_children(children, key)
        probe_key = jax.random.fold_in(key, len(children))
        params["probe"] = width**-0.5 * jax.random.normal(probe_key, (width,), jnp.float32)
        return params, state

    def apply(child: Children, x: Float[Array, "n t d"]) -> Float[Array, "n d"]:
        params = child.params

        def project(name: str, x: Array) -> Array:
            if fused:
                of = slice(width) if name == "query" else slice(width, None)
                part = jax.tree.map(lambda a: a[..., of], params["query_key_value"])
            else:
                part = params[name]
            y, _ = projections[name].apply(part, {}, x, train=child.train)
            return y.reshape(*y.shape[:-1], -1, width // heads)

        probe = jnp.broadcast_to(params["probe"].astype(x.dtype), (x.shape[0], 1, width))
        k, v = jnp.split(project("key_value", x), 2, axis=2)
        y = dot_product_attention(project("query", probe), k, v)
        y = child("output", y.reshape(-1, width))
        return y + child("feed_forward", child("norm", y))

    return composite(children, apply, init=init)


def distilled_head(width: int, num_classes: int) -> Layer:
    """Average the logits of the class token and of the distillation token (DeiT).

    [N, 2, D] -> [N, num_classes]. Params are ``class`` and ``distillation``.
    """
    children = {name: layers.dense(width, num_classes) for name in ("class", "distillation")}

    def average(child: Children, x: Float[Array, "n t d"]) -> Float[Array, "n c"]:
        first, second = (child(name, x[:, i]) for i, name in enumerate(children))
        return (first + second) / 2

    return composite(children, average)


def resize_positions(
    positions: Float[Array, "p d"],
    grid: tuple[int, int],
    new_grid: tuple[int, int],
    interpolation: Interpolation,
) -> Float[Array, "q d"]:
    """Resize learned positions to another grid of patches.

    ``bicubic`` is cubic convolution with a = -0.75, without antialiasing. ``bicubic_antialiased``
    has a = -0.5, and a wider kernel where the grid shrinks. Both are torch's ``interpolate``.
    """
    rows, columns = (
        jnp.asarray(_resize_matrix(n, m, interpolation == "bicubic_antialiased"), positions.dtype)
        for n, m in zip(grid, new_grid, strict=True)
    )
    on_grid = positions.reshape(*grid, -1)
    resized = jnp.einsum("ir,jc,rcd->ijd", rows, columns, on_grid, precision="highest")
    return resized.reshape(-1, positions.shape[-1])


def _resize_matrix(n: int, m: int, antialias: bool) -> np.ndarray:
    """Weights [m, n] of n values for m, by cubic convolution (Keys 1981)."""
    a = -0.5 if antialias else -0.75
    widen = max(n / m, 1.0) if antialias else 1.0
    reach = int(np.ceil(2 * widen)) + 1
    centers = (np.arange(m)[:, None] + 0.5) * n / m - 0.5
    taps = np.arange(-reach, n + reach)[None]
    t = np.abs(taps - centers) / widen
    inner = (a + 2) * t**3 - (a + 3) * t**2 + 1
    outer = a * (t**3 - 5 * t**2 + 8 * t - 4)
    weights = np.where(t <= 1, inner, np.where(t < 2, outer, 0.0))
    if antialias:  # values beyond the border have no weight
        weights = weights[:, reach : reach + n]
        return np.asarray(weights / weights.sum(1, keepdims=True))
    matrix = np.zeros((m, n))  # values beyond the border repeat those at the border
    for i, tap in enumerate(np.clip(taps[0], 0, n - 1)):
        matrix[:, tap] += weights[:, i]
    return matrix


def _mean(x: Array) -> Array:
    return upcast(x).mean(1).astype(x.dtype)


def _check_image(
    x: Array,
    image_shape: tuple[int, ...],
    patch: tuple[int, int],
    interpolate: Interpolation | None,
) -> None:
    height, width, channels = image_shape
    if x.ndim != 4 or x.shape[-1] != channels:
        raise ValueError(f"image_transformer: expected [N, H, W, {channels}], got {x.shape}")
    if x.shape[1:3] == (height, width):
        return
    if interpolate is None:
        raise ValueError(
            f"image_transformer: positions are learned for images of {height} x {width}, got "
            f"{x.shape[1]} x {x.shape[2]}; resize the images, or interpolate the positions"
        )
    if x.shape[1] < patch[0] or x.shape[2] < patch[1]:
        raise ValueError(
            f"image_transformer: an image of {x.shape[1]} x {x.shape[2]} is smaller than a patch "
            f"{patch}"
        )
