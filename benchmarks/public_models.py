"""Public models, from checkouts of their repositories, as train steps.

    git clone https://github.com/google-deepmind/nanodo CHECKOUTS/nanodo
    ...
    python -m benchmarks.planning --checkouts CHECKOUTS

Each entry of `PUBLIC` names a repository of GitHub. Its checkout is in a folder of the same name,
without the owner. The models' code is not changed: a hand-placed checkpoint replaces the class of
the blocks, or its ``__call__``. Sizes are small, so that a compilation takes seconds: 8 blocks
of width 256, and 8 rows of 256 tokens or patches.
"""

import dataclasses
import functools
import importlib
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import meta
from jax import Array

import fnet
from benchmarks.checkpointed import Hand, Problem, linen_blocks, problem, tokens

DEPTH, WIDTH, HEADS, ROWS, LENGTH, VOCABULARY = 6, 256, 4, 8, 256, 2048


class Public(NamedTuple):
    """A public model.

    Attributes:
      repository: ``owner/name`` on GitHub.
      build: ``build(hand, checkout)`` imports it and makes a train step.
    """

    repository: str
    build: Callable[[Hand, Path], Problem]


def cover_calls(hand: Hand, module: type[Any], calls: int, remat: Callable[..., Any]) -> None:
    """Put calls of a class of modules under a library's ``remat(f, policy=...)``."""
    plain, numbers = module.__call__, itertools.count()

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hand.covers(next(numbers) % calls):
            return plain(self, *args, **kwargs)
        covered = remat(lambda *args: plain(*args, **kwargs), policy=hand.policy)
        return covered(self, *args)

    module.__call__ = call


def load(file: Path, **stubs: Any) -> Any:
    """Import one file of a package, with stubs of modules (``__`` for dots) that it can lack."""
    for name, stub in stubs.items():
        sys.modules[name.replace("__", ".")] = stub
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return module


def linen_params(model: Any, *inputs: jax.ShapeDtypeStruct) -> Callable[[Array], Any]:
    """Return a function that makes a linen model's parameters."""

    def init(key: Array) -> Any:
        zeros = [jnp.zeros(x.shape, x.dtype) for x in inputs]
        return meta.unbox(model.init(key, *zeros)["params"])

    return init


def language_model(apply: Callable[..., Array], init: Callable[[Array], Any]) -> Problem:
    """Make a train step from ``apply(params, token, key)``, which returns logits."""

    def loss(params: Any, state: Any, batch: Any, key: Array) -> Array:
        logits = apply(params, batch["token"], key)
        return fnet.losses.cross_entropy(logits, batch["next"]).mean(-1)

    return problem(loss, init, tokens(ROWS, LENGTH))


def nnx_model(make: Callable[[nnx.Rngs], Any]) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
    """Return ``merge(params)``, which makes a module, and ``init(key)`` of its parameters."""
    split: Any = nnx.split
    graph, _, rest = split(nnx.eval_shape(lambda: make(nnx.Rngs(0))), nnx.Param, ...)

    def merge(params: Any) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), rest)
        return nnx.merge(graph, params, zeros)

    return merge, lambda key: nnx.state(make(nnx.Rngs(key)), nnx.Param)


def nanodo(hand: Hand, checkout: Path) -> Problem:
    """Decoder of nanodo (linen)."""
    model: Any = importlib.import_module("nanodo.model")
    model.TBlock = linen_blocks(hand, model.TBlock, DEPTH)
    config = model.DoConfig(
        D=WIDTH, H=HEADS, L=LENGTH, N=DEPTH, V=VOCABULARY, F=4 * WIDTH, fsdp_enabled=False
    )
    network = model.TransformerDo(config)
    init = linen_params(network, tokens(1, LENGTH)["token"])
    return language_model(lambda params, x, key: network.apply({"params": params}, x), init)


def lm1b(hand: Hand, checkout: Path) -> Problem:
    """Language model of flax's examples (linen), with dropout."""
    models = load(checkout / "examples/lm1b/models.py")
    models.EncoderDecoder1DBlock = linen_blocks(hand, models.EncoderDecoder1DBlock, DEPTH)
    config = models.TransformerConfig(
        vocab_size=VOCABULARY,
        output_vocab_size=VOCABULARY,
        emb_dim=WIDTH,
        qkv_dim=WIDTH,
        mlp_dim=4 * WIDTH,
        num_heads=HEADS,
        num_layers=DEPTH,
        max_len=LENGTH,
    )
    network = models.TransformerLM(config)
    init = linen_params(
        models.TransformerLM(config.replace(deterministic=True)), tokens(1, LENGTH)["token"]
    )
    return language_model(
        lambda params, x, key: network.apply({"params": params}, x, rngs={"dropout": key}), init
    )


def gemma(hand: Hand, checkout: Path) -> Problem:
    """Gemma 3 of flax's examples (nnx)."""
    sys.path.insert(0, str(checkout / "examples/gemma"))
    modules, transformer, transformer_cfg = map(
        importlib.import_module, ("modules", "transformer", "transformer_cfg")
    )
    cover_calls(hand, modules.Block, DEPTH, nnx.remat)
    kinds = (modules.AttentionType.LOCAL_SLIDING,) * 5 + (modules.AttentionType.GLOBAL,)
    config = dataclasses.replace(
        transformer_cfg.TransformerConfig.gemma3_1b(),
        num_layers=DEPTH,
        num_embed=VOCABULARY,
        embed_dim=WIDTH,
        hidden_dim=4 * WIDTH,
        num_heads=HEADS,
        head_dim=WIDTH // HEADS,
        num_kv_heads=1,
        attention_types=tuple(kinds[i % 6] for i in range(DEPTH)),
        sliding_window_size=128,
    )
    merge, init = nnx_model(lambda rngs: transformer.Transformer(config, rngs=rngs))

    def apply(params: Any, x: Array, key: Array) -> Array:
        positions = jnp.broadcast_to(jnp.arange(LENGTH), x.shape)
        mask = jnp.broadcast_to(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), (*x.shape, LENGTH))
        return merge(params)(x, positions, None, mask)[0]

    return language_model(apply, init)


def image_classifier(apply: Callable[..., Array], init: Callable[[Array], Any]) -> Problem:
    """Make a train step from ``apply(params, image)``, which returns logits of 100 classes."""

    def loss(params: Any, state: Any, batch: Any, key: Array) -> Array:
        return fnet.losses.cross_entropy(apply(params, batch["image"]), batch["label"])

    batch = {
        "image": jax.ShapeDtypeStruct((ROWS, 128, 128, 3), jnp.float32),
        "label": jax.ShapeDtypeStruct((ROWS,), jnp.int32),
    }
    return problem(loss, init, batch)


def big_vision(hand: Hand, checkout: Path) -> Problem:
    """Vision transformer of big_vision (linen)."""
    # Its `utils` and `common` load checkpoints, and import TensorFlow.
    stub = types.ModuleType("stub")
    models: Any = types.ModuleType("models")
    models.common = stub
    sys.modules["big_vision.models"] = models
    root: Any = types.ModuleType("big_vision")
    root.utils, root.models = stub, models
    vit = load(checkout / "big_vision/models/vit.py", big_vision=root, big_vision__utils=stub)
    vit.Encoder1DBlock = linen_blocks(hand, vit.Encoder1DBlock, DEPTH, static_argnums=(2,))
    network = vit.Model(
        100, patch_size=(8, 8), width=WIDTH, depth=DEPTH, mlp_dim=4 * WIDTH, num_heads=HEADS
    )
    init = linen_params(network, jax.ShapeDtypeStruct((1, 128, 128, 3), jnp.float32))
    return image_classifier(lambda params, x: network.apply({"params": params}, x)[0], init)


def bonsai_vit(hand: Hand, checkout: Path) -> Problem:
    """Vision transformer of bonsai (nnx)."""
    vit = load(checkout / "bonsai/models/vit/modeling.py")
    cover_calls(hand, vit.TransformerEncoder, DEPTH, nnx.remat)
    config = dataclasses.replace(
        vit.ModelConfig.vit_p16_224(),
        image_size=(128, 128),
        patch_size=(8, 8),
        hidden_dim=WIDTH,
        num_heads=HEADS,
        mlp_dim=4 * WIDTH,
        num_layers=DEPTH,
        num_labels=100,
    )
    merge, init = nnx_model(lambda rngs: vit.ViTClassificationModel(config, rngs=rngs))
    return image_classifier(lambda params, x: merge(params)(x, rngs=None), init)


def bonsai_mamba2(hand: Hand, checkout: Path) -> Problem:
    """Mamba 2 of bonsai (nnx), in chunks of 64 tokens."""
    mamba2 = load(checkout / "bonsai/models/mamba2/modeling.py")
    cover_calls(hand, mamba2.Mamba2Block, DEPTH, nnx.remat)
    config = mamba2.ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        state_size=64,
        head_dim=WIDTH // HEADS,
        chunk_size=64,
        num_hidden_layers=DEPTH,
    )
    merge, init = nnx_model(lambda rngs: mamba2.Mamba2ForCausalLM(config, rngs=rngs))
    return language_model(lambda params, x, key: merge(params)(x)["logits"], init)


def equinox_model(
    make: Callable[[Array], Any],
) -> tuple[Callable[[Any], Any], Callable[[Array], Any]]:
    """Return ``merge(params)``, which makes a module, and ``init(key)`` of its parameters."""
    shapes = eqx.filter_eval_shape(make, jax.random.key(0))
    static = eqx.filter(shapes, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), inverse=True)
    return lambda params: eqx.combine(params, static), lambda key: eqx.filter(
        make(key), eqx.is_array
    )


def _map_calls(layer: Any) -> None:
    plain = layer.__call__
    layer.__call__ = lambda self, x: jax.vmap(functools.partial(plain, self))(x)


def equinox_gpt(hand: Hand, checkout: Path) -> Problem:
    """NanoGPT in Equinox."""
    # It calls these layers with a whole sequence, as versions of Equinox before 0.11 allow.
    # The module of attention was public.
    for layer in (eqx.nn.Embedding, eqx.nn.LayerNorm):
        _map_calls(layer)
    vars(eqx.nn)["attention"] = importlib.import_module("equinox.nn._attention")
    gpt = load(checkout / "model.py")
    cover_calls(hand, gpt.Block, DEPTH, eqx.filter_checkpoint)
    config = gpt.GPTConfig(
        block_size=LENGTH, vocab_size=VOCABULARY, n_layer=DEPTH, n_head=HEADS, n_embd=WIDTH
    )
    merge, init = equinox_model(lambda key: gpt.GPT(config, key=key))

    def loss(params: Any, state: Any, batch: Any, key: Array) -> Array:
        model = merge(params)
        return jax.vmap(lambda x, y: model.forward(x, y)[1])(batch["token"], batch["next"])

    return problem(loss, init, tokens(ROWS, LENGTH))


def equinox_mamba(hand: Hand, checkout: Path) -> Problem:
    """Mamba in Equinox. Its scan over tokens is under `jax.checkpoint` already."""
    # The loader of torch's weights needs more packages.
    stub: Any = types.ModuleType("loader")
    stub.load_pretrained = None
    sys.modules["mamba_jax.modelling.equinox.loader"] = stub
    # It uses an argument of `jnp.clip` that was renamed.
    clip = jnp.clip
    vars(jnp)["clip"] = lambda x, a_min: clip(x, min=a_min)
    mamba = importlib.import_module("mamba_jax.modelling.equinox")
    cover_calls(hand, mamba.ResidualBlock, DEPTH, eqx.filter_checkpoint)
    merge, init = equinox_model(
        lambda key: mamba.MambaLLM(WIDTH, DEPTH, VOCABULARY, state_dim=8, key=key)
    )
    return language_model(lambda params, x, key: jax.vmap(merge(params))(x), init)


def diffusion(hand: Hand, checkout: Path) -> Problem:
    """Diffusion U-Net (linen) at 64 x 64, with attention."""
    unet = load(checkout / "denoising_diffusion_flax/unet.py")
    unet.ResnetBlock = linen_blocks(hand, unet.ResnetBlock, 11)
    unet.AttnBlock = linen_blocks(hand, unet.AttnBlock, 5)
    network = unet.Unet(dim=32, dim_mults=(1, 2))
    batch = {
        "image": jax.ShapeDtypeStruct((ROWS, 64, 64, 3), jnp.float32),
        "time": jax.ShapeDtypeStruct((ROWS,), jnp.float32),
    }

    def loss(params: Any, state: Any, batch: Any, key: Array) -> Array:
        noise = jax.random.normal(key, batch["image"].shape)
        mixed = batch["image"] * 0.5 + noise
        got = network.apply({"params": params}, mixed, batch["time"])
        return ((got - noise) ** 2).mean((1, 2, 3))

    return problem(loss, linen_params(network, *batch.values()), batch)


def haiku(hand: Hand, checkout: Path) -> Problem:
    """Transformer of Haiku's examples, with dropout. A hand-placed block is half of a layer."""
    model = load(checkout / "examples/transformer/model.py")

    def remat(plain: Callable[..., Any], policy: Any) -> Callable[..., Any]:
        covered: Any = hk.remat
        return lambda self, *args: covered(functools.partial(plain, self), policy=policy)(*args)

    cover_calls(hand, hk.MultiHeadAttention, DEPTH, remat)
    cover_calls(hand, hk.Sequential, DEPTH, remat)

    def forward(x: Array) -> Array:
        transformer = model.Transformer(HEADS, DEPTH, WIDTH // HEADS, dropout_rate=0.1)
        return model.LanguageModel(transformer, WIDTH, VOCABULARY, pad_token=0)(x)

    network = hk.transform(forward)
    return language_model(
        lambda params, x, key: network.apply(params, key, x),
        lambda key: network.init(key, jnp.zeros((1, LENGTH), jnp.int32)),
    )


PUBLIC = {
    "nanodo": Public("google-deepmind/nanodo", nanodo),
    "lm1b": Public("google/flax", lm1b),
    "gemma": Public("google/flax", gemma),
    "big_vision ViT": Public("google-research/big_vision", big_vision),
    "bonsai ViT": Public("jax-ml/bonsai", bonsai_vit),
    "bonsai Mamba 2": Public("jax-ml/bonsai", bonsai_mamba2),
    "Equinox GPT": Public("anh-tong/nanoGPT-equinox", equinox_gpt),
    "Equinox Mamba": Public("vvvm23/mamba-jax", equinox_mamba),
    "diffusion U-Net": Public("yiyixuxu/denoising-diffusion-flax", diffusion),
    "Haiku transformer": Public("google-deepmind/dm-haiku", haiku),
}


def public_problem(name: str, hand: Hand, checkouts: Path) -> Problem:
    """Import a public model and make its train step.

    Raises:
      FileNotFoundError: if its checkout is missing.
      ImportError: if a package that it needs is missing.
    """
    repository, build = PUBLIC[name]
    checkout = checkouts / repository.split("/")[1]
    if not checkout.is_dir():
        raise FileNotFoundError(f"expected a checkout of {repository} in {checkout}")
    sys.path.insert(0, str(checkout))
    return build(hand, checkout)
