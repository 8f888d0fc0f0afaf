"""Longest context for QLoRA of Llama-3.1-8B by GPU memory, compiled ahead of time.

    JAX_PLATFORMS=cpu python -m benchmarks.contexts --target h100
    JAX_PLATFORMS=cpu python -m benchmarks.contexts --target h100 --tunix  # needs google-tunix

The step is `finetune_lora`'s, with nf4 weights, rank 32, one row and remat ``nested`` or
``offload``, for a model of one or two blocks and for two contexts; `fnet fit` extends it to 32
blocks. The model is
a config and a file of headers, written here. Memory of a card is as many 10^9 bytes as its name
says, so 24 GB are 22.4 GiB: about 5 % of a card is left for the runtime. The figures of Unsloth are
from its documentation, with offloaded activations. ``--tunix`` compiles the LoRA step of
google-tunix for the same target: its model, loss and remat of whole layers, nf4 weights by qwix.
"""

import argparse
import dataclasses
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from benchmarks.measure import markdown_table
from fnet.interop.huggingface import build_model
from fnet.memory import format_bytes, peak, tree_bytes
from fnet.memory.target import Target, compile_for
from train.data.model_folder import FileTensor, ModelFolder
from train.platform import use_cpu
from train.run import fine_tuning as fit
from train.run.planning import target_of

BLOCKS = 32
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": BLOCKS,
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
    fit.write_shallow(fit.Model(ModelFolder(path, LLAMA, tensors), BLOCKS, 1, None), BLOCKS, path)


def tunix_bytes(target: Target, blocks: int, tokens: int) -> tuple[int, int]:
    """Bytes of the train state of tunix, and what its step takes in addition."""
    import qwix
    from flax import nnx
    from tunix.models.llama3 import model as llama
    from tunix.sft import peft_trainer

    config = dataclasses.replace(
        llama.ModelConfig.llama3p1_8b(), num_layers=blocks, remat_config=llama.RematConfig.DECODER
    )

    def build() -> tuple[nnx.Module, nnx.Optimizer]:
        model = llama.Llama3(config, rngs=nnx.Rngs(0))
        nnx.update(
            model, jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.state(model, nnx.Param))
        )
        projections = ".*(q|k|v|o|gate|up|down)_proj"
        lora = qwix.LoraProvider(
            module_path=projections, rank=32, alpha=32.0, weight_qtype="nf4", tile_size=64
        )
        model = qwix.apply_lora_to_model(model, lora, rngs=nnx.Rngs(0), **model.get_model_input())
        return model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.LoRAParam)

    graph, state = nnx.split(nnx.eval_shape(build))

    def step(state: nnx.State, batch: dict[str, jax.Array]) -> tuple[nnx.State, jax.Array]:
        model, optimizer = nnx.merge(graph, state)
        lora_only = nnx.DiffState(0, nnx.LoRAParam)
        grad = nnx.value_and_grad(peft_trainer._default_loss_fn, argnums=lora_only)
        loss, grads = grad(model, **batch)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    integers = jax.ShapeDtypeStruct((1, tokens), jnp.int32)
    batch = {"input_tokens": integers, "input_mask": integers, "positions": integers}
    batch["attention_mask"] = jax.ShapeDtypeStruct((1, tokens, tokens), jnp.bool_)
    compiled = compile_for(target, jax.jit(step, donate_argnums=0), state, batch)
    return tree_bytes(state), peak(compiled).total - tree_bytes(state)


def tunix_longest(target: Target) -> dict[int, int]:
    """Longest context of tunix by GB of memory.

    A parabola through three contexts, because it holds all scores of a block, and a line through
    one and two blocks.
    """
    contexts = (2048, 4096, 8192)
    of_one = [tunix_bytes(target, 1, n) for n in contexts]
    state, temporaries = tunix_bytes(target, 2, contexts[-1])
    state = of_one[0][0] + (BLOCKS - 1) * (state - of_one[0][0])
    square, slope, fixed = np.polyfit(contexts, [rest for _, rest in of_one], 2)
    slope += (BLOCKS - 1) * (temporaries - of_one[-1][1]) / contexts[-1]
    return {
        card: int(max(0, *np.roots([square, slope, fixed + state - card * 1e9]).real))
        for card in UNSLOTH
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="h100")
    parser.add_argument("--contexts", type=int, nargs=2, default=(16384, 65536))
    parser.add_argument("--tunix", action="store_true", help="only the figures of tunix")
    given = parser.parse_args()
    use_cpu()
    if given.tunix:
        longest = tunix_longest(target_of(given.target))
        print(
            markdown_table(
                [{"GPU memory": f"{c} GB", "tunix": f"{n:,}"} for c, n in longest.items()]
            )
        )
        return
    with tempfile.TemporaryDirectory() as folder:
        headers(Path(folder) / "llama")
        model = fit.read_model(Path(folder) / "llama")
        target, start = target_of(given.target), time.process_time()
        planner = fit.Planner(model, 0, 32, target, (1, 2), Path(folder), print, print)
        row = planner.state("lora_nf4", 16, 1)
        lines = {}
        for policy in ("nested", "offload"):
            first, second = (
                planner.cost(row, fit.Shape(policy, 1, n), 1).peak for n in given.contexts
            )
            slope = (second - first) / (given.contexts[1] - given.contexts[0])
            lines[policy] = slope, first - slope * given.contexts[0]
    rows = [
        {
            "GPU memory": f"{card} GB",
            **{p: f"{max(0, int((card * 1e9 - b) / a)):,}" for p, (a, b) in lines.items()},
            "Unsloth": f"{theirs:,}",
        }
        for card, theirs in UNSLOTH.items()
    ]
    print(markdown_table(rows))
    print(f"state {format_bytes(row.state_bytes)}; {time.process_time() - start:.0f} CPU seconds")
    for policy, (slope, fixed) in lines.items():
        rest = format_bytes(int(fixed - row.state_bytes))
        print(f"{policy}: {rest} at any context, {slope / 1024:.1f} KiB per token")


if __name__ == "__main__":
    main()
