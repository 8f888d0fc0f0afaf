"""Host memory and time to load a published model, compared with safetensors' own loader.

    python -m benchmarks.loading

A Llama of random bfloat16 weights is written to a temporary folder, then loaded in a fresh process
by fnet, and by `safetensors.numpy.load_file` followed by `jnp.array` of each transposed kernel. The
memory is the process's peak above the loaded parameters.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.claims import Claim, argument_parser, publish
from benchmarks.measure import in_fresh_process, markdown_table
from fnet.cpu.heap import limit_freed_memory
from fnet.interop.huggingface import build_model, from_huggingface
from fnet.memory import format_bytes, tree_bytes
from train.data.model_folder import read_folder
from train.run.process_memory import HighWater

SIDES = ("fnet", "safetensors")


def llama(width: int, blocks: int) -> dict[str, Any]:
    """Config of a Llama with a vocabulary of 16 times its width."""
    return {
        "model_type": "llama",
        "vocab_size": 16 * width,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_hidden_layers": blocks,
        "num_attention_heads": width // 64,
    }


def write_model(path: Path, config: Mapping[str, Any]) -> None:
    """Write a published model with random bfloat16 weights."""
    model = build_model(config)
    generator = np.random.default_rng(0)
    tensors = {
        t.name: generator.standard_normal(t.file_shape, np.float32)
        for t in model.tensors
        if not t.optional
    }
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    halves = {name: a.astype(ml_dtypes.bfloat16) for name, a in tensors.items()}
    save_file(halves, path / "model.safetensors")


def measure(side: str, folder: str) -> dict[str, float]:
    """Load the model in this process: bytes above the parameters, and seconds."""
    jax.block_until_ready(jnp.zeros(1))
    memory, start = HighWater(), time.perf_counter()
    if side == "fnet":
        source = read_folder(Path(folder))
        _, params = from_huggingface(source.config, source.tensors)
    else:
        arrays = load_file(Path(folder) / "model.safetensors")
        params = {
            name: jnp.array(a.T if a.ndim == 2 and "embed" not in name else a)
            for name, a in arrays.items()
        }
    jax.block_until_ready(params)
    seconds, peak = time.perf_counter() - start, memory.bytes()
    assert peak is not None, "this system does not report the peak memory of a process"
    leaves: list[Any] = jax.tree.leaves(params)
    return {
        "above": peak - tree_bytes(params),
        "params": tree_bytes(params),
        "largest": max(a.nbytes for a in leaves),
        "seconds": seconds,
    }


def main() -> None:
    parser = argument_parser(__doc__, rounds=3)
    parser.add_argument("--width", type=int, default=1024, help="Width of the model.")
    parser.add_argument("--blocks", type=int, default=12, help="Number of blocks.")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        limit_freed_memory()  # as the program does
        print(json.dumps(measure(*args.worker)))
        return
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), llama(args.width, args.blocks))
        for _ in range(args.rounds):
            for side in SIDES:
                runs[side].append(in_fresh_process("loading", side, folder))
    medians = {
        side: {key: statistics.median(r[key] for r in results) for key in results[0]}
        for side, results in runs.items()
    }
    rows = [
        {
            "loader": side,
            "parameters": format_bytes(int(m["params"])),
            "largest tensor": format_bytes(int(m["largest"])),
            "peak above the parameters": format_bytes(int(m["above"])),
            "seconds": f"{m['seconds']:.2f}",
        }
        for side, m in medians.items()
    ]
    print(markdown_table(rows, left=1))
    ours, theirs = medians["fnet"], medians["safetensors"]
    size = format_bytes(int(ours["params"]))
    publish(
        [
            Claim(
                f"load a model of {size}: host memory above the parameters",
                "its largest tensor + 64 MiB",
                ours["above"] / (ours["largest"] + 64 * 2**20),
                "<= 1.0",
                "memory",
            ),
            Claim(
                f"load a model of {size}: host memory above the parameters",
                "safetensors.numpy.load_file",
                ours["above"] / theirs["above"],
                "<= 1.0",
                "memory",
            ),
            Claim(
                f"load a model of {size}: time",
                "safetensors.numpy.load_file",
                ours["seconds"] / theirs["seconds"],
                "<= 1.0",
                "time",
            ),
        ],
        args,
        "jax",
        "jaxlib",
    )


if __name__ == "__main__":
    main()
