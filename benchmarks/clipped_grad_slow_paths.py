"""Clipped sums for losses that use parameters in unusual ways: time and memory.

    python -m benchmarks.clipped_grad_slow_paths
    python -m benchmarks.clipped_grad_slow_paths --only embedding LoRA --rounds 5

Every construct is a small network whose parameters reach their layer by an unusual route: a gather
under ``vmap``, a slice in a loop, a concatenation, a product of parameters. Three programs are
jitted, on the CPU, in float32:

- "plain" is ``jax.grad`` of the mean loss.
- "fnet" is `fnet.clipped_grad`.
- "vmap" materializes every per-example gradient with ``jax.vmap(jax.grad(...))``. It then clips
  and sums them with one matrix product per array.

The sums of fnet are compared with vmap's. It takes about ten minutes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.sharding import AxisType, PartitionSpec

import fnet
from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.clipped_grad import difference
from benchmarks.measure import interleaved, markdown_table, temporaries

CLIP = 1e-2
TOLERANCE = 2e-5
NEAR_PLAIN = "<= 1.3"
"""Target of the time relative to a plain gradient, for constructs that select from parameters."""


class Case(NamedTuple):
    """A per-example loss ``(params, *batch) -> [batch]`` and its arguments.

    Attributes:
      loss: the loss.
      params: parameters.
      batch: arrays [batch, ...].
      time: target of the time relative to a plain gradient, or "".
      memory: target of the temporaries relative to a plain gradient, or "".
      outside: wraps the functions that are compared, such as by `jax.shard_map`.
    """

    loss: Callable[..., Any]
    params: Any
    batch: tuple[Array, ...]
    time: str = ""
    memory: str = ""
    outside: Callable[[Any], Any] = lambda f: f


def main() -> None:
    parser = argument_parser(__doc__, rounds=15)
    parser.add_argument("--only", nargs="+", default=[""], help="Parts of the names to measure.")
    args = parser.parse_args()
    rows, claims = [], []
    for name, make in CASES.items():
        if any(part in name for part in args.only):
            row, own_claims = measure(name, make(), args.rounds)
            print(f"{name}: {row}", flush=True)
            rows.append(row)
            claims += own_claims
    print(f"\nMedians of {args.rounds} interleaved rounds, {jax.default_backend()}, float32.\n")
    print(markdown_table(rows))
    publish(claims, args, "jax", "jaxlib", "flax", "equinox")


def measure(name: str, case: Case, rounds: int) -> tuple[dict[str, str], list[Claim]]:
    """Compare the three programs for one construct."""
    row = {"": name, "plain ms": "", "fnet / plain": "", "fnet / vmap": ""}
    row |= {"temporaries / plain": "", "temporaries / vmap": "", "differs": ""}
    functions = {
        "plain": jax.grad(lambda params, *batch: case.loss(params, *batch).mean()),
        "fnet": lambda *args: fnet.clipped_grad(case.loss, CLIP)(*args)[0],
        "vmap": by_vmap(case.loss),
    }
    arguments = (case.params, *case.batch)
    programs = {}
    for key, function in functions.items():
        try:
            programs[key] = jax.jit(case.outside(function)).lower(*arguments).compile()
        except Exception as error:  # What JAX or fnet raise here is the result.
            reason = f"{key}: {type(error).__name__}: {str(error).splitlines()[0]}"
            claim = Claim(f"{name}: time", "vmap(grad)", float("nan"), "<= 1.0", "time")
            return row | {"differs": reason}, [claim] if key == "fnet" else []
    differs = difference(programs["fnet"](*arguments), programs["vmap"](*arguments))
    assert differs <= TOLERANCE, f"{name}: the sum differs from vmap's by {differs:.1e}"
    calls = {key: functools.partial(program, *arguments) for key, program in programs.items()}
    once = interleaved(calls, 1)
    slow = {key: call for key, call in calls.items() if once[key] > 10 * once["plain"]}
    quick = {key: call for key, call in calls.items() if key not in slow}
    seconds = interleaved(quick, rounds) | interleaved(slow, min(rounds, 3))
    size = {key: temporaries(program) for key, program in programs.items()}
    time = {key: seconds["fnet"] / seconds[key] for key in ("plain", "vmap")}
    memory = {key: size["fnet"] / size[key] for key in ("plain", "vmap")}
    row |= {
        "plain ms": f"{seconds['plain'] * 1e3:.1f}",
        "fnet / plain": f"{time['plain']:.2f}",
        "fnet / vmap": f"{time['vmap']:.2f}",
        "temporaries / plain": f"{memory['plain']:.2f}",
        "temporaries / vmap": f"{memory['vmap']:.2f}",
        "differs": f"{differs:.0e}",
    }
    claims = [Claim(f"{name}: time", "vmap(grad)", time["vmap"], "<= 1.0", "time")]
    claims.append(Claim(f"{name}: time", "plain gradient", time["plain"], case.time, "time"))
    claims.append(Claim(f"{name}: temporaries", "plain gradient", memory["plain"], case.memory))
    return row, claims


def by_vmap(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Materialize per-example gradients, clip and sum them."""

    def total(params: Any, *batch: Array) -> Any:
        def example_loss(params: Any, *example: Array) -> Array:
            value: Array = loss(params, *(a[None] for a in example))[0]
            return value

        axes = (None, *[0] * len(batch))
        grads = jax.vmap(jax.grad(example_loss), axes)(params, *batch)
        squares = [
            jnp.square(jnp.abs(g)).reshape(len(g), -1).sum(1) for g in jax.tree.leaves(grads)
        ]
        scales = jnp.minimum(1, CLIP / jnp.sqrt(sum(squares)))
        return jax.tree.map(lambda g: jnp.tensordot(scales.astype(g.dtype), g, 1), grads)

    return total


def normal(seed: int, *shape: int) -> Array:
    """Random numbers of variance 1 / shape[-2], as of a kernel."""
    deviation = shape[-2] ** -0.5 if len(shape) > 1 else 1.0
    return jax.random.normal(jax.random.key(seed), shape) * deviation


def inputs(*shape: int) -> Array:
    return jax.random.normal(jax.random.key(99), shape)


def labels(size: int) -> Array:
    return jnp.arange(size) % 10


def tokens(vocabulary: int, *shape: int) -> Array:
    return jax.random.randint(jax.random.key(98), shape, 0, vocabulary)


def squares(y: Array) -> Array:
    """A loss per row."""
    return jnp.square(y).sum(range(1, y.ndim))


cross_entropy = optax.losses.softmax_cross_entropy_with_integer_labels


def flax_case(model: nn.Module, x: Array, time: str = "", memory: str = "") -> Case:
    """Classify with a flax module."""
    params = jax.jit(model.init)(jax.random.key(0), x)
    return Case(
        lambda params, x, y: cross_entropy(model.apply(params, x), y),
        params,
        (x, labels(len(x))),
        time,
        memory,
    )


def equinox_case(model: Any, *batch: Array, time: str = "") -> Case:
    """Run an Equinox module for one example at a time under vmap, as its examples do."""
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any, *batch: Array) -> Array:
        return squares(jax.vmap(eqx.combine(params, static))(*batch))

    return Case(loss, params, batch, time)


def equinox_embedding() -> Case:
    class Model(eqx.Module):
        embed: eqx.nn.Embedding
        head: eqx.nn.Linear

        def __call__(self, t: Array) -> Array:
            y: Array = self.head(jax.vmap(self.embed)(t).mean(0))
            return y

    keys = jax.random.split(jax.random.key(0), 2)
    model = Model(eqx.nn.Embedding(8192, 256, key=keys[0]), eqx.nn.Linear(256, 256, key=keys[1]))
    return equinox_case(model, tokens(8192, 64, 64), time=NEAR_PLAIN)


def gather_under_vmap() -> Case:
    def loss(params: Any, t: Array) -> Array:
        h = jax.vmap(lambda row: params["table"][row])(t)
        return squares(jnp.tanh(h) @ params["head"])

    params = {"table": normal(0, 8192, 256), "head": normal(1, 256, 64)}
    return Case(loss, params, (tokens(8192, 64, 64),), time=NEAR_PLAIN)


def fori_loop() -> Case:
    def loss(w: Array, x: Array) -> Array:
        return squares(jax.lax.fori_loop(0, len(w), lambda i, h: jnp.tanh(h @ w[i]), x))

    return Case(loss, normal(0, 8, 256, 256), (inputs(256, 256),), time=NEAR_PLAIN)


def unrolled() -> Case:
    def loss(w: Array, x: Array) -> Array:
        for i in range(len(w)):
            x = jnp.tanh(x @ w[i])
        return squares(x)

    return Case(loss, normal(0, 8, 256, 256), (inputs(256, 256),), time=NEAR_PLAIN)


def unstacked() -> Case:
    def loss(w: Array, x: Array) -> Array:
        for layer in jnp.unstack(w):
            x = jnp.tanh(x @ layer)
        return squares(x)

    return Case(loss, normal(0, 8, 256, 256), (inputs(256, 256),), time=NEAR_PLAIN)


def stacked() -> Case:
    def loss(params: Any, x: Array) -> Array:
        w = jnp.stack(params)
        return squares(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0])

    params = [normal(i, 256, 256) for i in range(8)]
    return Case(loss, params, (inputs(256, 256),), time=NEAR_PLAIN)


def concatenated() -> Case:
    def loss(params: Any, x: Array) -> Array:
        w = jnp.concatenate([params["q"], params["k"], params["v"]], 1)
        q, k, v = jnp.split(x @ w, 3, -1)
        y = jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2) / 16) @ v
        return squares(y @ params["out"])

    params = {name: normal(i, 256, 256) for i, name in enumerate(("q", "k", "v", "out"))}
    return Case(loss, params, (inputs(64, 32, 256),), time=NEAR_PLAIN)


def bidirectional_lstm() -> Case:
    class Model(nn.Module):
        @nn.compact
        def __call__(self, t: Array) -> Array:
            x = nn.Embed(4096, 128)(t)
            forward, backward = (nn.RNN(nn.OptimizedLSTMCell(128)) for _ in range(2))
            y: Any = nn.Bidirectional(forward, backward)(x)
            return nn.Dense(10)(y.mean(1))

    return flax_case(Model(), tokens(4096, 64, 32), time=NEAR_PLAIN)


def weight_norm() -> Case:
    def loss(params: Any, x: Array) -> Array:
        for layer in params:
            direction = layer["v"] / jnp.linalg.norm(layer["v"], axis=0)
            x = jnp.tanh(x @ (layer["g"] * direction))
        return squares(x)

    params = [{"v": normal(i, 512, 512), "g": jnp.ones(512)} for i in range(3)]
    return Case(loss, params, (inputs(256, 512),))


def weight_standardization() -> Case:
    def convolution(x: Array, kernel: Array) -> Array:
        centred = kernel - kernel.mean((0, 1, 2))
        return jax.lax.conv_general_dilated(
            x, centred / jnp.sqrt(jnp.square(centred).mean((0, 1, 2)) + 1e-5), (1, 1), "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )  # fmt: skip

    def loss(params: Any, x: Array) -> Array:
        for kernel in params:
            x = jax.nn.relu(convolution(x, kernel)) / 12
        return squares(x.mean((1, 2)))

    params = [normal(i, 3, 3, n, 64) for i, n in enumerate((3, 64, 64))]
    return Case(loss, params, (inputs(64, 16, 16, 3),))


def straight_through() -> Case:
    def quantized(w: Array) -> Array:
        return w + jax.lax.stop_gradient(jnp.round(w * 16) / 16 - w)

    def loss(params: Any, x: Array) -> Array:
        for w in params:
            x = jnp.tanh(x @ quantized(w))
        return squares(x)

    params = [normal(i, 512, 512) for i in range(3)]
    return Case(loss, params, (inputs(256, 512),), time=NEAR_PLAIN)


def lora_merged() -> Case:
    frozen = normal(9, 512, 512)

    def loss(params: Any, x: Array) -> Array:
        for layer in params:
            x = jnp.tanh(x @ (frozen + layer["a"] @ layer["b"]))
        return squares(x)

    params = [{"a": normal(i, 512, 8), "b": normal(i + 5, 8, 512)} for i in range(3)]
    return Case(loss, params, (inputs(64, 32, 512),))


def equinox_mixer() -> Case:
    class Block(eqx.Module):
        over_patches: eqx.nn.MLP
        over_channels: eqx.nn.MLP
        norms: list[eqx.nn.LayerNorm]

        def __init__(self, patches: int, width: int, key: Array) -> None:
            keys = jax.random.split(key, 2)
            self.over_patches = eqx.nn.MLP(patches, patches, 128, 1, key=keys[0])
            self.over_channels = eqx.nn.MLP(width, width, 256, 1, key=keys[1])
            self.norms = [eqx.nn.LayerNorm((width, patches)) for _ in range(2)]

        def __call__(self, y: Array) -> Array:
            y = y + jax.vmap(self.over_patches)(self.norms[0](y))
            return y + jax.vmap(self.over_channels, 1, 1)(self.norms[1](y))

    class Mixer(eqx.Module):
        patches: eqx.nn.Conv2d
        blocks: list[Block]
        head: eqx.nn.Linear

        def __call__(self, x: Array) -> Array:
            y = self.patches(x)
            y = y.reshape(len(y), -1)
            for block in self.blocks:
                y = block(y)
            return self.head(y.mean(1))

    keys = jax.random.split(jax.random.key(0), 6)
    model = Mixer(
        eqx.nn.Conv2d(3, 128, 4, 4, key=keys[0]),
        [Block(64, 128, key) for key in keys[1:5]],
        eqx.nn.Linear(128, 10, key=keys[5]),
    )
    return equinox_case(model, inputs(32, 3, 32, 32))


def equinox_unet() -> Case:
    class Stage(eqx.Module):
        convolution: eqx.nn.Conv2d
        norm: eqx.nn.GroupNorm

        def __init__(self, n_in: int, n_out: int, key: Array) -> None:
            self.convolution = eqx.nn.Conv2d(n_in, n_out, 3, padding=1, key=key)
            self.norm = eqx.nn.GroupNorm(8, n_out)

        def __call__(self, x: Array) -> Array:
            return jax.nn.silu(self.norm(self.convolution(x)))

    class UNet(eqx.Module):
        down: list[Stage]
        up: list[Stage]
        shrink: eqx.nn.Conv2d
        grow: eqx.nn.ConvTranspose2d
        head: eqx.nn.Conv2d

        def __call__(self, x: Array) -> Array:
            x = self.down[0](x)
            h = self.up[0](self.down[1](self.shrink(x)))
            return self.head(self.up[1](jnp.concatenate([x, self.grow(h)])))

    keys = jax.random.split(jax.random.key(0), 7)
    model = UNet(
        [Stage(3, 32, keys[0]), Stage(32, 64, keys[1])],
        [Stage(64, 64, keys[2]), Stage(64, 32, keys[3])],
        eqx.nn.Conv2d(32, 32, 3, 2, 1, key=keys[4]),
        eqx.nn.ConvTranspose2d(64, 32, 4, 2, padding=1, key=keys[5]),
        eqx.nn.Conv2d(32, 3, 1, key=keys[6]),
    )
    return equinox_case(model, inputs(32, 3, 32, 32))


def equinox_bert() -> Case:
    class Layer(eqx.Module):
        attention: eqx.nn.MultiheadAttention
        mlp: eqx.nn.MLP
        norms: list[eqx.nn.LayerNorm]

        def __init__(self, width: int, key: Array) -> None:
            keys = jax.random.split(key, 2)
            self.attention = eqx.nn.MultiheadAttention(4, width, key=keys[0])
            self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])
            self.norms = [eqx.nn.LayerNorm(width) for _ in range(2)]

        def __call__(self, x: Array) -> Array:
            x = jax.vmap(self.norms[0])(x + self.attention(x, x, x))
            return jax.vmap(self.norms[1])(x + jax.vmap(self.mlp)(x))

    class Bert(eqx.Module):
        tokens: eqx.nn.Embedding
        segments: eqx.nn.Embedding
        positions: eqx.nn.Embedding
        layers: list[Layer]
        head: eqx.nn.Linear

        def __call__(self, t: Array, segment: Array) -> Array:
            x = jax.vmap(self.tokens)(t) + jax.vmap(self.segments)(segment)
            x = x + jax.vmap(self.positions)(jnp.arange(len(t)))
            for layer in self.layers:
                x = layer(x)
            return self.head(jnp.tanh(x[0]))

    keys = jax.random.split(jax.random.key(0), 8)
    model = Bert(
        eqx.nn.Embedding(4096, 128, key=keys[0]),
        eqx.nn.Embedding(2, 128, key=keys[1]),
        eqx.nn.Embedding(64, 128, key=keys[2]),
        [Layer(128, key) for key in keys[3:7]],
        eqx.nn.Linear(128, 10, key=keys[7]),
    )
    t = tokens(4096, 32, 64)
    return equinox_case(model, t, t % 2)


def vision_transformer(remat: bool) -> Case:
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Array, _: None) -> tuple[Array, None]:
            h = nn.LayerNorm()(x)
            x = x + nn.MultiHeadDotProductAttention(4, deterministic=True)(h, h)
            h = nn.gelu(nn.Dense(512)(nn.LayerNorm()(x)))
            return x + nn.Dense(128)(h), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Array) -> Array:
            x = nn.Conv(128, (4, 4), (4, 4))(x).reshape(len(x), -1, 128)
            x = x + self.param("positions", nn.initializers.normal(0.02), (1, *x.shape[1:]))
            block = nn.remat(Block, prevent_cse=False) if remat else Block
            layers = nn.scan(block, {"params": 0}, split_rngs={"params": True}, length=8)
            x, _ = layers()(x, None)
            return nn.Dense(10)(nn.LayerNorm()(x).mean(1))

    return flax_case(Model(), inputs(32, 32, 32, 3), time=NEAR_PLAIN, memory=NEAR_PLAIN)


def complex_parameters() -> Case:
    def loss(params: Any, x: Array) -> Array:
        h = jnp.fft.rfft(x, axis=1)
        h = jnp.einsum("btn,nm->btm", h, params["mixer"])
        return squares(jnp.fft.irfft(h, n=x.shape[1], axis=1) @ params["head"])

    mixer = jax.lax.complex(normal(0, 256, 256), normal(1, 256, 256))
    return Case(loss, {"mixer": mixer, "head": normal(2, 256, 256)}, (inputs(64, 32, 256),))


def dense_layers() -> tuple[Callable[[Any, Array], Array], Any, Array]:
    def loss(params: Any, x: Array) -> Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return squares(x)

    return loss, [normal(i, 512, 512) for i in range(3)], inputs(256, 512)


def shard_map_inside() -> Case:
    loss, params, x = dense_layers()
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,))
    rows = PartitionSpec("data")
    inside = jax.shard_map(loss, mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows)
    return Case(inside, params, (x,), time=NEAR_PLAIN)


def shard_map_outside() -> Case:
    loss, params, x = dense_layers()
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,))

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        def total(params: Any, x: Array) -> Any:
            varying = jax.lax.pcast(params, "data", to="varying")
            return jax.lax.psum(function(varying, x), "data")

        specs = (PartitionSpec(), PartitionSpec("data"))
        mapped: Callable[..., Any] = jax.shard_map(
            total, mesh=mesh, in_specs=specs, out_specs=PartitionSpec()
        )
        return mapped

    return Case(loss, params, (x,), time=NEAR_PLAIN, outside=outside)


CASES: dict[str, Callable[[], Case]] = {
    "vmap(eqx.nn.Embedding)": equinox_embedding,
    "gather under vmap": gather_under_vmap,
    "fori_loop over w[i]": fori_loop,
    "unrolled w[0], w[1], ...": unrolled,
    "jnp.unstack(w)": unstacked,
    "jnp.stack(ws), scanned": stacked,
    "concatenated weights": concatenated,
    "flax bidirectional LSTM": bidirectional_lstm,
    "weight norm": weight_norm,
    "weight standardization": weight_standardization,
    "straight-through": straight_through,
    "LoRA, merged": lora_merged,
    "Equinox Mixer": equinox_mixer,
    "Equinox U-Net": equinox_unet,
    "Equinox BERT": equinox_bert,
    "ViT, scanned": functools.partial(vision_transformer, remat=False),
    "ViT, scanned and rematerialized": functools.partial(vision_transformer, remat=True),
    "complex parameters": complex_parameters,
    "shard_map inside": shard_map_inside,
    "shard_map outside": shard_map_outside,
}


if __name__ == "__main__":
    main()
