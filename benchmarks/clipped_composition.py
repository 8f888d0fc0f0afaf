"""DP-SGD step of a language model with microbatches, remat and FSDP: peak memory per device.

    JAX_PLATFORMS=cpu python -m benchmarks.clipped_composition --target h100

The model has 12 scanned blocks of width 768 with 12 heads, and a tied embedding of 32,768 tokens:
110 M parameters. It computes in bfloat16, with `fnet.linear_cross_entropy` as its head. The batch
has 64 sequences of 1,024 tokens; the optimizer is AdamW. The step with `fnet.autodiff.clipped`
and noise is compared with the plain step of the same remat policy and number of microbatches, for
one device and for 8 devices with data parallelism or FSDP. Nothing is run.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.experimental import topologies
from jax.sharding import AxisType

import fnet
import fnet.memory.target
from benchmarks import transformer_step
from benchmarks.claims import Claim, add_sizes, argument_parser, publish
from benchmarks.measure import markdown_table
from fnet import layers
from fnet.layer import Layer
from fnet.layers.norm import rms_norm_layer
from fnet.memory import format_bytes, peak, timeline
from fnet.memory.target import TARGETS, Gpu
from train.run.mesh import Layout, shardings

OPTIMIZER = optax.adamw(1e-3)
DEVICES = 8
MESHES = {"1 device": (1, 1), "data 8": (DEVICES, 1), "fsdp 8": (1, DEVICES)}
TARGET = "<= 1.15"


class Settings(transformer_step.Sizes):
    """Sizes of the model and the batch, and settings of the step."""

    policy: str
    microbatches: int


def scanned_model(s: Settings) -> tuple[Layer, fnet.autodiff.Loss]:
    """A language model whose blocks are one `jax.lax.scan`, and its loss."""
    attention = layers.attention(s.width, s.heads, causal=True, rotary=10_000.0, bias=False)
    block = layers.Block(attention, layers.feed_forward(s.width, 8 * s.width // 3 // 64 * 64))
    children = {
        "embedding": layers.embedding(s.vocabulary, s.width, dtype=jnp.bfloat16),
        "blocks": fnet.repeat(layers.stack(s.width, [block]), s.blocks),
        "norm": rms_norm_layer(s.width),
    }

    model = fnet.serial(**children)

    def loss(params: Any, state: Any, batch: Any, key: Array) -> Array:
        tokens = batch["tokens"]
        x, _ = model.apply(params, state, tokens[:, :-1], key=key, train=True)
        table = params["embedding"]["embedding"]
        return fnet.linear_cross_entropy(x, table, tokens[:, 1:], vocab_axis=0).mean(1)

    return model, loss


def compile_step(
    s: Settings, mode: Any, mesh: tuple[int, int], devices: Any, compiler_options: Any
) -> jax.stages.Compiled:
    """Compile the step for the first devices, arranged as ``mesh``: data parallel x FSDP."""
    model, loss = scanned_model(s)
    shapes = jax.eval_shape(lambda: fnet.TrainState.create(model, OPTIMIZER, jax.random.key(0)))
    layout = Layout(
        jax.make_mesh(
            mesh,
            ("data", "fsdp"),
            devices=devices[: mesh[0] * mesh[1]],
            axis_types=(AxisType.Auto, AxisType.Auto),
        )
    )
    state = layout.state(shapes)
    batch = layout.batch({"tokens": jax.ShapeDtypeStruct((s.batch, s.tokens + 1), jnp.int32)})
    step = fnet.make_step(
        loss, OPTIMIZER, mode, remat=s.policy, microbatches=s.microbatches,
        state_sharding=shardings(state),
    )  # fmt: skip
    return step.lower(state, batch).compile(compiler_options=compiler_options)


def main() -> None:
    parser = argument_parser(__doc__, rounds=0, target=True)
    add_sizes(
        parser,
        {
            "blocks": 12,
            "width": 768,
            "heads": 12,
            "tokens": 1024,
            "batch": 64,
            "vocabulary": 32_768,
            "microbatches": 4,
        },
    )
    parser.add_argument("--policy", default="segments", help="Remat policy.")
    parser.add_argument("--meshes", nargs="+", default=list(MESHES), choices=MESHES, help="Meshes.")
    parser.add_argument("--explain", action="store_true", help="Print the buffers at the peak.")
    s = parser.parse_args(namespace=Settings())
    devices, options = jax.devices(), {}
    if s.target:
        known = TARGETS[s.target]
        assert isinstance(known, Gpu), "Several devices are described for GPUs only."
        target = fnet.memory.target.describe(s.target)
        options = target.compiler_options
        devices = topologies.get_topology_desc(
            s.target, "cuda", target_config=known.as_text(), topology=f"1x1x{DEVICES}"
        ).devices
    modes = {
        "plain": fnet.autodiff.mean,
        "clipped": fnet.autodiff.clipped(1.0, noise_multiplier=1.0, expected_batch_size=s.batch),
    }
    rows, claims = [], []
    for mesh in s.meshes:
        totals = {}
        for name, mode in modes.items():
            compiled = compile_step(s, mode, MESHES[mesh], devices, options)
            totals[name] = peak(compiled).total
            print(f"{mesh}, {name}: {format_bytes(totals[name])}", flush=True)
            for buffer in timeline(compiled).at_peak[:20] if s.explain else ():
                print(f"  {buffer}")
        ratio = totals["clipped"] / totals["plain"]
        rows.append(
            {"": mesh}
            | {f"{name} MB": f"{size / 1e6:.0f}" for name, size in totals.items()}
            | {"clipped / plain": f"{ratio:.3f}"}
        )
        what = f"DP-SGD step of a language model, {s.policy}, {s.microbatches} microbatches, {mesh}"
        claims.append(Claim(f"{what}: peak per device", "plain step", ratio, TARGET))
    print(markdown_table(rows))
    publish(claims, s, "jax", "jaxlib", "optax")


if __name__ == "__main__":
    main()
