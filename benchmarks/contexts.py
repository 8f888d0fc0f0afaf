"""Longest context for QLoRA of Llama-3.1-8B by GPU memory, compiled ahead of time.

    JAX_PLATFORMS=cpu python -m benchmarks.contexts --target h100

The step is that of `finetune_lora` with nf4 weights, rank 32, one row and remat ``nested``, for
a model of one block and for two contexts; `fnet fit` extends it to 32 blocks. The model is
a config and a file of headers, written here. Memory of a card is as many 10^9 bytes as its name
says, so 24 GB are 22.4 GiB: about 5 % of a card is left for the runtime. The figures of Unsloth are
those of its documentation, with offloaded activations.
"""

import argparse
import tempfile
import time
from pathlib import Path

import ml_dtypes
import numpy as np

from benchmarks.measure import markdown_table
from fnet.interop.huggingface import build_model
from fnet.memory import format_bytes
from train.commands import fit
from train.data.model_folder import FileTensor, ModelFolder
from train.platform import use_cpu
from train.run.prediction import target_of

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
UNSLOTH = {8: 2972, 12: 21848, 16: 40724, 24: 78475, 40: 153977, 48: 191728, 80: 342733}
"""https://docs.unsloth.ai/basics/unsloth-benchmarks: tokens by GB, Llama 3.1 8B, QLoRA, rank 32."""


def headers(path: Path) -> None:
    """Write config and headers of the model to a folder."""
    dtype = np.dtype(ml_dtypes.bfloat16)
    tensors = {
        t.name: FileTensor(path, 0, t.file_shape, dtype)
        for t in build_model(LLAMA).tensors
        if not t.optional
    }
    blocks = 32
    fit.write_shallow(fit.Model(ModelFolder(path, LLAMA, tensors), blocks, 1, None), blocks, path)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="h100")
    parser.add_argument("--contexts", type=int, nargs=2, default=(16384, 65536))
    given = parser.parse_args()
    use_cpu()
    with tempfile.TemporaryDirectory() as folder:
        headers(Path(folder) / "llama")
        model = fit.read_model(Path(folder) / "llama")
        target, start = target_of(given.target), time.process_time()
        planner = fit._Planner(model, 0, 32, target, (1, 2), Path(folder), print, print)
        state = planner.row("lora_nf4", 16, 1).state_bytes
        short, long = given.contexts
        first, second = (
            planner.cost("lora_nf4", fit.Shape("nested", 1, n), 1, state).peak
            for n in (short, long)
        )
    slope = (second - first) / (long - short)
    fixed = first - slope * short
    rows = [
        {
            "GPU memory": f"{card} GB",
            f"fnet, {given.target}": f"{max(0, int((card * 1e9 - fixed) / slope)):,}",
            "Unsloth": f"{theirs:,}",
        }
        for card, theirs in UNSLOTH.items()
    ]
    print(markdown_table(rows))
    print(
        f"state {format_bytes(state)}, {format_bytes(int(fixed - state))} at any context, "
        f"{slope / 1024:.1f} KiB per token; {time.process_time() - start:.0f} CPU seconds"
    )


if __name__ == "__main__":
    main()
