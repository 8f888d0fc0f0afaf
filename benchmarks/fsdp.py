"""Temporaries of FSDP on eight devices, compared with data parallelism.

    python -m benchmarks.fsdp                                        # eight devices on this CPU
    JAX_PLATFORMS=cpu python -m benchmarks.fsdp --target h100        # needs fnet-jax[target-gpu]
    JAX_PLATFORMS=cpu python -m benchmarks.fsdp --target v5e         # needs fnet-jax[target-tpu]

Each program is compiled, nothing runs. The model is the one of the recipe text_transformer at other
widths. Data parallelism holds all gradients on each device. FSDP holds one n-th of them, and the
weights that are gathered at a time:

    bound = temporaries of data parallelism + two gathered blocks - (1 - 1 / n) gradients

Tokens are looked up in a table that is gathered as a whole. It counts as a block if it is larger.
"""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import markdown_table
from fnet.memory import peak, tree_bytes
from fnet.memory.peak import compile_min_memory
from fnet.memory.target import TARGETS, Gpu, describe
from train.config import Config, LanguageModel, Mesh, Optim, TextFile
from train.run.mesh import Layout, layout, make_cpu_devices
from train.run.setup import setup

DEVICES = 8
SLICES = {"h100": "1x1x8", "v5e": "v5e:2x4"}
"""Topology of eight devices, by target."""


class Measured(NamedTuple):
    """Bytes per device.

    Attributes:
      temporaries: of the compiled step.
      gradients: of the whole gradient.
      largest_block: of the parameters of the largest block, or of the token table.
    """

    temporaries: int
    gradients: int
    largest_block: int


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--target", choices=SLICES, help="Device to compile for.")
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=64)
    args = parser.parse_args()
    make_cpu_devices(Mesh(fsdp=DEVICES))
    rows, claims = [], []
    for width in args.widths:
        by_data, by_fsdp = (measure(args, width, mesh) for mesh in MESHES)
        saved = by_data.gradients * (DEVICES - 1) // DEVICES
        bound = by_data.temporaries + 2 * by_data.largest_block - saved
        rows.append(
            {
                "width": f"{width}",
                "data 8 MB": f"{by_data.temporaries / 1e6:.1f}",
                "fsdp 8 MB": f"{by_fsdp.temporaries / 1e6:.1f}",
                "bound MB": f"{bound / 1e6:.1f}",
                "fsdp / data": f"{by_fsdp.temporaries / by_data.temporaries:.3f}",
                "fsdp / bound": f"{by_fsdp.temporaries / bound:.3f}",
            }
        )
        what = f"FSDP, 8 devices ({args.target or 'CPU'}), width {width}: temporaries per device"
        claims += list(claims_of(what, by_data, by_fsdp, bound))
        print(markdown_table(rows[-1:]), flush=True)
    sizes = f"{args.blocks} blocks, context {args.context}, batch {args.batch_size}"
    print(f"\n{sizes}, float32, AdamW.\n")
    print(markdown_table(rows))
    publish(claims, args, "jax", "jaxlib")


MESHES = Mesh(data=DEVICES), Mesh(fsdp=DEVICES)


def claims_of(what: str, by_data: Measured, by_fsdp: Measured, bound: float) -> Iterator[Claim]:
    """Claims for one width."""
    yield Claim(what, "data parallel", by_fsdp.temporaries / by_data.temporaries)
    baseline = "data parallel + two gathered blocks - 7/8 of the gradients"
    yield Claim(what, baseline, by_fsdp.temporaries / bound, "<= 1.0")


def measure(args: Any, width: int, mesh: Mesh) -> Measured:
    """Compile the step of a mesh."""
    config = Config(
        data=TextFile(context=args.context, batch_size=args.batch_size),
        model=LanguageModel(
            mixers=("attention",), blocks=args.blocks, width=width, heads=width // 32
        ),
        optim=Optim(name="adamw", learning_rate=3e-3, clip_norm=1.0),
        mesh=mesh,
    )
    run = setup(config)
    sizes = _sizes(run.state_shapes.params)
    if args.target is None:
        run = run.on(layout(config))
        compiled, _ = compile_min_memory(run.step.lower(run.state_shapes, run.batch_shapes))
    else:
        devices, options = _devices(args.target)
        axes = (AxisType.Auto,) * 2
        grid = np.array(devices).reshape(mesh.data, mesh.fsdp)
        run = run.on(Layout(jax.sharding.Mesh(grid, ("data", "fsdp"), axis_types=axes)))
        lowered = run.step.lower(run.state_shapes, run.batch_shapes)
        compiled = lowered.compile(compiler_options=options)
    return Measured(peak(compiled).temporaries, *sizes)


def _sizes(params: Any) -> tuple[int, int]:
    """Bytes of all parameters, and of the largest block or other layer."""
    parts = [*params["blocks"].values(), *(p for name, p in params.items() if name != "blocks")]
    return tree_bytes(params), max(map(tree_bytes, parts))


def _devices(target: str) -> tuple[list[Any], dict[str, Any]]:
    known = describe(target)
    properties = TARGETS[target]
    if isinstance(properties, Gpu):
        config = {"target_config": properties.as_text(), "topology": SLICES[target]}
        topology = topologies.get_topology_desc(target, "cuda", **config)
    else:
        os.environ["TPU_ACCELERATOR_TYPE"] = "v5litepod-8"
        topology = topologies.get_topology_desc(SLICES[target], "tpu")
    return topology.devices, known.compiler_options


if __name__ == "__main__":
    main()
