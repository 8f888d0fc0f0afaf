"""Clipped gradients of common networks, compared with other libraries: time and memory.

    pip install '.[peers]'
    python -m benchmarks.clipped_grad_models
    python -m benchmarks.clipped_grad_models --only GPT LSTM --batch 16 --rounds 5

Each network is one that other libraries' tutorials train, at a size that a CPU trains. All programs
of a row run in turns in one process, in float32, without noise. A time is the median over rounds of
its ratio to the plain gradient of the mean loss in the same round, so that a busy machine matters
less. Sums are compared with `fnet.clipped_grad`'s for all examples at once. The programs:

- "at once", "one": `fnet.clipped_grad` with ``microbatch_size=batch`` and ``microbatch_size=1``
- "fnet": the one of both that `fnet.clipped_grad` chooses by itself
- "vmap": materializes, clips and sums all gradients, as one matrix product per parameter
- "optax": materializes them, and sums with ``per_example_global_norm_clip``
- "jax-privacy K": `jax_privacy.clipped_grad` with microbatches of K examples

Programs that materialize more than 1 GB are left out.
"""

import statistics
import time
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.clipped_grad import difference
from benchmarks.measure import markdown_table, temporaries
from fnet.autodiff import gradient_strategies

try:
    from jax_privacy.clipping import clipped_grad as by_jax_privacy
except ImportError:
    by_jax_privacy = None

CLIP = 1e-2
FAR_BEHIND = 8
"""Programs that take this many times the plain gradient run in two rounds only."""

CHOICES = {"at once": None, "one": 1}
MOST_BYTES = 1e9
TOLERANCE = 5e-5
VOCABULARY, CLASSES = 512, 10
cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels


class Model(NamedTuple):
    """A loss ``(params, x, y) -> losses [batch]`` and its arguments."""

    loss: Callable[..., Array]
    params: Any
    x: Any
    y: Array


def classifier(module: nn.Module, x: Array) -> Model:
    """Classify examples with a flax module."""
    y = jax.random.randint(jax.random.key(4), (len(x),), 0, CLASSES)
    params = jax.jit(module.init)(jax.random.key(0), x)
    return Model(lambda p, x, y: cross_entropy(module.apply(p, x), y), params, x, y)


def language_model(module: nn.Module, tokens: Array) -> Model:
    """Predict the next tokens with a flax module."""
    x, y = tokens[:, :-1], tokens[:, 1:]
    params = jax.jit(module.init)(jax.random.key(0), x)
    return Model(lambda p, x, y: cross_entropy(module.apply(p, x), y).mean(1), params, x, y)


def regression(module: nn.Module, *inputs: Array, target: Array) -> Model:
    """Fit arrays with a flax module of several inputs."""
    params = jax.jit(module.init)(jax.random.key(0), *inputs)

    def loss(p: Any, x: Any, y: Array) -> Array:
        outputs: Any = module.apply(p, *x)
        return jnp.square(outputs - y).reshape(len(y), -1).mean(1)

    return Model(loss, params, inputs, target)


def images(batch: int, size: int = 32, channels: int = 3) -> Array:
    return jax.random.normal(jax.random.key(3), (batch, size, size, channels))


def normal(*shape: int) -> Array:
    return jax.random.normal(jax.random.key(3), shape)


def tokens(batch: int, length: int, vocabulary: int = VOCABULARY) -> Array:
    return jax.random.randint(jax.random.key(3), (batch, length), 0, vocabulary)


class Dense(nn.Module):
    """A multilayer perceptron; without hidden layers, logistic regression."""

    widths: tuple[int, ...] = ()

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in self.widths:
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(CLASSES)(x)


class CNN(nn.Module):
    """The network of flax's MNIST example."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in (32, 64):
            x = nn.avg_pool(nn.relu(nn.Conv(width, (3, 3))(x)), (2, 2), (2, 2))
        return Dense((256,))(x.reshape(len(x), -1))


class ResNet(nn.Module):
    """Residual blocks with group norm, as in De et al. 2022; ``groups`` as in ResNeXt."""

    width: int = 32
    groups: int = 1

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(self.width, (3, 3))(x)
        for i in range(3):
            width, strides = self.width * 2**i, (1 + (i > 0),) * 2
            y = nn.Conv(width, (3, 3), strides)(nn.relu(nn.GroupNorm(8)(x)))
            y = nn.relu(nn.GroupNorm(8)(y))
            y = nn.Conv(width, (3, 3), feature_group_count=self.groups)(y)
            x = y + nn.Conv(width, (1, 1), strides)(x)
        return nn.Dense(CLASSES)(nn.relu(x).mean((1, 2)))


class ConvNeXt(nn.Module):
    """Depthwise convolutions and pointwise dense layers (Liu et al. 2022)."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x = nn.Conv(64, (4, 4), (4, 4))(x)
        for _ in range(4):
            y = nn.LayerNorm()(nn.Conv(64, (7, 7), feature_group_count=64)(x))
            x = x + nn.Dense(64)(nn.gelu(nn.Dense(256)(y)))
        return nn.Dense(CLASSES)(x.mean((1, 2)))


class UNet(nn.Module):
    """Two resolutions with a skip connection (Ronneberger et al. 2015)."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        def stage(x: Array, width: int) -> Array:
            return nn.silu(nn.GroupNorm(8)(nn.Conv(width, (3, 3))(x)))

        first = stage(x, 32)
        h = stage(stage(nn.Conv(32, (3, 3), (2, 2))(first), 64), 64)
        h = nn.ConvTranspose(32, (4, 4), (2, 2))(h)
        return nn.Conv(3, (1, 1))(stage(jnp.concatenate([first, h], -1), 32))


class Block(nn.Module):
    """A pre-norm transformer block."""

    causal: bool = True
    rank: int = 0

    @nn.compact
    def __call__(self, x: Array, _: None = None) -> tuple[Array, None]:
        width, h = x.shape[-1], nn.LayerNorm()(x)
        mask = nn.make_causal_mask(x[..., 0]) if self.causal else None
        x = x + nn.MultiHeadDotProductAttention(4, deterministic=True)(h, h, mask=mask)
        h = nn.LayerNorm()(x)
        return x + nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(h))), None


class GPT(nn.Module):
    """A language model; ``stack`` is "unrolled", "scan" or "remat"."""

    width: int = 128
    depth: int = 4
    stack: str = "unrolled"

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = nn.Embed(VOCABULARY, self.width)(x)
        h = h + self.param("positions", nn.initializers.normal(0.02), h.shape[1:])
        if self.stack == "unrolled":
            for _ in range(self.depth):
                h, _ = Block()(h)
        else:
            block = nn.remat(Block, prevent_cse=False) if self.stack == "remat" else Block
            scanned = nn.scan(block, {"params": 0}, split_rngs={"params": True}, length=self.depth)
            h, _ = scanned()(h, None)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(h))


class Encoder(nn.Module):
    """BERT with a classifier, or a ViT of 4 x 4 patches for images."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        if x.ndim == 4:
            h = nn.Conv(128, (4, 4), (4, 4))(x).reshape(len(x), -1, 128)
        else:
            h = nn.Embed(8192, 128)(x)
        h = h + self.param("positions", nn.initializers.normal(0.02), h.shape[1:])
        for _ in range(4):
            h, _ = Block(causal=False)(h)
        return nn.Dense(CLASSES)(nn.LayerNorm()(h).mean(1))


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021)."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = nn.Conv(128, (4, 4), (4, 4))(x).reshape(len(x), -1, 128)
        for _ in range(4):
            y = nn.LayerNorm()(h).swapaxes(1, 2)
            h = h + nn.Dense(h.shape[1])(nn.gelu(nn.Dense(128)(y))).swapaxes(1, 2)
            h = h + nn.Dense(128)(nn.gelu(nn.Dense(256)(nn.LayerNorm()(h))))
        return nn.Dense(CLASSES)(h.mean(1))


class Recurrent(nn.Module):
    """An LSTM or GRU over a sequence."""

    cell: Any = nn.OptimizedLSTMCell
    bidirectional: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        layer: Any = nn.RNN(self.cell(128))
        if self.bidirectional:
            layer = nn.Bidirectional(layer, nn.RNN(self.cell(128)))
        return nn.Dense(CLASSES)(layer(x)[:, -1])


class TCN(nn.Module):
    """Dilated causal convolutions, as in WaveNet."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = nn.Embed(VOCABULARY, 64)(x)
        for i in range(4):
            y = nn.Conv(128, (2,), padding="CAUSAL", kernel_dilation=2**i)(h)
            h = h + nn.Dense(64)(jnp.tanh(y[..., :64]) * nn.sigmoid(y[..., 64:]))
        return nn.Dense(VOCABULARY)(h)


class TextClassifier(nn.Module):
    """The mean of a large embedding, and a dense layer (fastText)."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return Dense((64,))(nn.Embed(20_000, 64)(x).mean(1))


class DLRM(nn.Module):
    """Embeddings of categories, their inner products, and a perceptron (Naumov et al. 2019)."""

    @nn.compact
    def __call__(self, x: Array, categories: Array) -> Array:
        rows = [nn.Embed(10_000, 32)(c) for c in categories.T]
        h = jnp.stack([nn.Dense(32)(nn.relu(nn.Dense(64)(x))), *rows], 1)
        products = (h @ h.swapaxes(1, 2)).reshape(len(x), -1)
        return Dense((128, 64))(jnp.concatenate([h[:, 0], products], 1))


class Autoencoder(nn.Module):
    """Dense layers to a code and back."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in (256, 32, 256):
            x = nn.relu(nn.Dense(width)(x))
        return nn.Dense(784)(x)


class GraphNetwork(nn.Module):
    """Messages along the edges of one graph per example (Battaglia et al. 2018)."""

    @nn.compact
    def __call__(self, nodes: Array, senders: Array, receivers: Array) -> Array:
        h, gather = nn.Dense(64)(nodes), jax.vmap(lambda h, i: h[i])
        for _ in range(3):
            pairs = jnp.concatenate([gather(h, senders), gather(h, receivers)], -1)
            messages = nn.Dense(64)(nn.relu(nn.Dense(64)(pairs)))
            sums = jax.vmap(lambda m, i, n=h[0]: jnp.zeros_like(n).at[i].add(m))(
                messages, receivers
            )
            h = h + nn.Dense(64)(nn.relu(nn.Dense(64)(jnp.concatenate([h, sums], -1))))
        return nn.Dense(1)(h.mean(1))


class PointNet(nn.Module):
    """A perceptron for each point, and the largest of each feature (Qi et al. 2017)."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in (64, 128, 256):
            x = nn.relu(nn.Dense(width)(x))
        return Dense((128,))(x.max(1))


class Experts(nn.Module):
    """A block whose tokens choose one of 4 dense layers."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        h = nn.Embed(VOCABULARY, 64)(x)
        gate = nn.softmax(nn.Dense(4)(h))
        chosen = jax.nn.one_hot(gate.argmax(-1), 4) * gate
        up = self.param("up", nn.initializers.lecun_normal(), (4, 64, 256))
        down = self.param("down", nn.initializers.lecun_normal(), (4, 256, 64))
        y = jnp.einsum("btef,efd->bted", nn.gelu(jnp.einsum("btd,edf->btef", h, up)), down)
        return nn.Dense(VOCABULARY)(h + jnp.einsum("bted,bte->btd", y, chosen))


def lora(batch: int) -> Model:
    """GPT of 256 tokens with low-rank updates of its dense kernels. Only they are trained."""
    model = language_model(GPT(), tokens(batch, 257))
    flat, treedef = jax.tree.flatten(model.params)
    rng = np.random.default_rng(0)

    def factors(p: Array) -> Any:
        if p.ndim != 2 or p.shape[0] == VOCABULARY:
            return None
        a = rng.normal(size=(p.shape[0], 8)) / p.shape[0] ** 0.5
        return jnp.asarray(a, jnp.float32), jnp.zeros((8, p.shape[1]), jnp.float32)

    updates = enumerate(map(factors, flat))
    trained = {str(i): f for i, f in updates if f is not None}

    def loss(trained: Any, x: Array, y: Array) -> Array:
        merged = list(flat)
        for i, (a, b) in trained.items():
            merged[int(i)] = merged[int(i)] + a @ b
        return model.loss(jax.tree.unflatten(treedef, merged), x, y)

    return Model(loss, trained, model.x, model.y)


MODELS: dict[str, Callable[[int], Model]] = {
    "logistic regression": lambda b: classifier(Dense(), normal(b, 784)),
    "MLP 784-512-512-10": lambda b: classifier(Dense((512, 512)), normal(b, 784)),
    "autoencoder": lambda b: regression(Autoencoder(), normal(b, 784), target=normal(b, 784)),
    "CNN": lambda b: classifier(CNN(), images(b, 28, 1)),
    "ResNet, group norm": lambda b: classifier(ResNet(), images(b)),
    "ResNeXt": lambda b: classifier(ResNet(groups=8), images(b)),
    "ConvNeXt": lambda b: classifier(ConvNeXt(), images(b)),
    "U-Net": lambda b: regression(UNet(), images(b), target=images(b)),
    "ViT": lambda b: classifier(Encoder(), images(b)),
    "Mixer": lambda b: classifier(Mixer(), images(b)),
    "BERT, 64 tokens": lambda b: classifier(Encoder(), tokens(b, 64, 8192)),
    "GPT, 32 tokens": lambda b: language_model(GPT(), tokens(b, 33)),
    "GPT, 256 tokens": lambda b: language_model(GPT(), tokens(b, 257)),
    "GPT, scanned": lambda b: language_model(GPT(stack="scan"), tokens(b, 129)),
    "GPT, checkpoints": lambda b: language_model(GPT(stack="remat"), tokens(b, 129)),
    "LoRA": lora,
    "LSTM": lambda b: classifier(Recurrent(), normal(b, 64, 32)),
    "GRU": lambda b: classifier(Recurrent(nn.GRUCell), normal(b, 64, 32)),
    "bidirectional LSTM": lambda b: classifier(Recurrent(bidirectional=True), normal(b, 64, 32)),
    "WaveNet": lambda b: language_model(TCN(), tokens(b, 129)),
    "text classifier": lambda b: classifier(TextClassifier(), tokens(b, 128, 20_000)),
    "DLRM": lambda b: regression(
        DLRM(), normal(b, 13), tokens(b, 8, 10_000), target=normal(b, CLASSES)
    ),
    "graph network": lambda b: regression(
        GraphNetwork(), normal(b, 32, 16), tokens(b, 128, 32), tokens(b + 1, 128, 32)[1:],
        target=normal(b, 1),
    ),
    "PointNet": lambda b: classifier(PointNet(), normal(b, 256, 3)),
    "mixture of experts": lambda b: language_model(Experts(), tokens(b, 65)),
}  # fmt: skip


def main() -> None:
    parser = argument_parser(__doc__, rounds=9)
    parser.add_argument("--only", nargs="+", default=[""], help="Parts of the names to measure.")
    parser.add_argument("--skip", nargs="+", default=[], help="Programs to leave out.")
    parser.add_argument("--batch", nargs="+", type=int, default=[16, 128], help="Batch sizes.")
    args = parser.parse_args()
    rows, claims = [], []
    for name, make in MODELS.items():
        for batch in args.batch if any(part in name for part in args.only) else ():
            jax.clear_caches()
            row = measure(make(batch), batch, args.rounds, args.skip)
            print(f"{name}, {batch}: {row}", flush=True)
            rows.append({"": name, "batch": str(batch)} | table_row(row))
            claims += claims_of(f"{name}, batch {batch}", row)
    print(f"\nMedians of {args.rounds} rounds, {jax.default_backend()}, float32.\n")
    print(markdown_table(rows))
    publish(claims, args, "jax", "jaxlib", "flax", "optax", "jax-privacy")


def programs(m: Model, batch: int) -> dict[str, Callable[..., Any]]:
    """Functions that return a sum, by name."""

    def of_one(p: Any, *example: Any) -> Array:
        value: Array = m.loss(p, *jax.tree.map(lambda a: a[None], example))[0]
        return value

    def gradients(*args: Any) -> Any:
        return jax.vmap(jax.grad(of_one), (None, 0, 0))(*args)

    def by_vmap(*args: Any) -> Any:
        grads = gradients(*args)
        squares = [jnp.square(g).reshape(batch, -1).sum(1) for g in jax.tree.leaves(grads)]
        scales = jnp.minimum(1, CLIP / jnp.sqrt(sum(squares)))
        return jax.tree.map(lambda g: jnp.tensordot(scales, g, 1), grads)

    functions = {"plain": jax.grad(lambda *args: m.loss(*args).mean())}
    for name, size in CHOICES.items():
        gradient = fnet.clipped_grad(m.loss, CLIP, microbatch_size=size or batch)
        functions[name] = lambda *args, gradient=gradient: gradient(*args)[0]
    nbytes = batch * sum(a.nbytes for a in jax.tree.leaves(m.params))
    if nbytes < MOST_BYTES:
        functions["vmap"] = by_vmap
        functions["optax"] = lambda *a: optax.per_example_global_norm_clip(gradients(*a), CLIP)[0]
    for size in (1, 4, 16, batch) if by_jax_privacy is not None else ():
        if size <= batch and nbytes * size / batch < MOST_BYTES:
            functions[f"jax-privacy {size}"] = by_jax_privacy(
                lambda *args: m.loss(*args)[0],
                l2_clip_norm=CLIP,
                batch_argnums=(1, 2),
                microbatch_size=None if size == batch else size,
            )
    return functions


def measure(
    m: Model, batch: int, rounds: int, skip: Collection[str]
) -> dict[str, tuple[float, float]]:
    """Time and temporaries of each program, relative to the plain gradient, by name."""
    compiled = {
        name: jax.jit(function).lower(*m[1:]).compile()
        for name, function in programs(m, batch).items()
        if name not in skip
    }
    expected = compiled["at once"](*m[1:])
    ratios: dict[str, list[float]] = {name: [] for name in compiled}
    for name, program in compiled.items():
        differs = 0.0 if name == "plain" else difference(program(*m[1:]), expected)
        assert differs <= TOLERANCE, f"{name} differs by {differs:.1e}"
    for number in range(rounds):
        seconds = {}
        for name, program in compiled.items():
            if number > 1 and statistics.median(ratios[name]) > FAR_BEHIND:
                continue
            start = time.perf_counter()
            jax.block_until_ready(program(*m[1:]))
            seconds[name] = time.perf_counter() - start
        for name, s in seconds.items():
            ratios[name].append(s / seconds["plain"])
    base = max(temporaries(compiled["plain"]), 1)
    row = {
        name: (statistics.median(ratios[name]), temporaries(p) / base)
        for name, p in compiled.items()
    }
    strategies = jax.tree.leaves(gradient_strategies(m.loss, *m[1:]))
    chosen = "one" if "one example at a time" in strategies else "at once"
    return {"fnet": row[chosen]} | row


def table_row(row: dict[str, tuple[float, float]]) -> dict[str, str]:
    """A row of the table: time and memory of fnet, and of the fastest other program."""
    others = rivals(row)
    best = min(others, key=lambda name: others[name][0])
    return {
        "fnet": f"{row['fnet'][0]:.2f}, {row['fnet'][1]:.2f}",
        "at once": f"{row['at once'][0]:.2f}, {row['at once'][1]:.2f}",
        "one": f"{row['one'][0]:.2f}, {row['one'][1]:.2f}",
        "fastest other": f"{others[best][0]:.2f}, {others[best][1]:.2f}",
        "which": best,
        "fnet / other": f"{row['fnet'][0] / others[best][0]:.2f}",
    }


def rivals(row: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    return {k: v for k, v in row.items() if k not in ("plain", "fnet", "at once", "one")}


def claims_of(name: str, row: dict[str, tuple[float, float]]) -> list[Claim]:
    """Compare with the fastest other program, and with a plain gradient."""
    others, (ours, _) = rivals(row), row["fnet"]
    best = min(others, key=lambda name: others[name][0])
    return [
        Claim(f"{name}: time", best, ours / others[best][0], "<= 1.02", "time"),
        Claim(f"{name}: time", "plain gradient", ours, "<= 1.1", "time"),
    ]


if __name__ == "__main__":
    main()
