"""Published folders in shards are read one tensor at a time."""

import subprocess
import sys

import jax
import numpy as np
import pytest

from tests.pretrained_folder import write_folder
from train.errors import UserError
from train.networks.pretrained import Pretrained
from train.networks.published.network import PretrainedNetwork, build_network

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 8000,
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6,
    "num_attention_heads": 8, "max_position_embeddings": 128,
}  # fmt: skip
PROGRAM = """
import resource, sys
import jax
from train.networks.pretrained import Pretrained
from train.networks.published.network import PretrainedNetwork, build_network

kind = None if sys.argv[2] == "None" else sys.argv[2]
network = build_network(Pretrained(path=sys.argv[1], lora_rank=2, quantize=kind), "bfloat16")
shapes = network.pretrained(*jax.eval_shape(network.init, jax.random.key(0)))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
params = jax.block_until_ready(network.read(shapes))
print(peak() - before - sum(a.nbytes for a in jax.tree.leaves(params)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", [None, "int8", "nf4"])
def test_reading_takes_the_largest_tensor_and_200_mb(tmp_path, kind):
    tensors = write_folder(tmp_path / "model", CONFIG, dtype=np.float32, shards=6)
    assert sum(a.nbytes for a in tensors.values()) > 450e6
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path / "model"), str(kind)],
        capture_output=True,
        text=True,
        check=True,
    )
    largest = max(a.nbytes for a in tensors.values())
    assert int(ran.stdout.split()[-1]) <= largest + 200e6


@pytest.mark.parametrize("kind", [None, "int8"])
def test_weights_that_are_not_finite_are_refused(tmp_path, kind):
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = write_folder(tmp_path)
    tensors[name][0, :3] = np.nan, np.inf, -np.inf
    write_folder(tmp_path, tensors=tensors)
    network = build_network(Pretrained(path=str(tmp_path), quantize=kind, lora_rank=2), "bfloat16")
    shapes = network.pretrained(*jax.eval_shape(network.init, jax.random.key(0)))
    with pytest.raises(UserError, match=r"blocks.* has 3 values that are NaN or infinite"):
        network.read(shapes)


def test_what_is_read_from_the_folder_is_all_but_what_the_model_lacks():
    fields = dict.fromkeys(PretrainedNetwork._fields[:5])
    params, frozen = {"classifier": 1, "blocks": 2}, {"frozen": 3}
    assert PretrainedNetwork(**fields).pretrained(params, {}) == params
    assert PretrainedNetwork(**fields, new="classifier").pretrained(params, {}) == {"blocks": 2}
    assert PretrainedNetwork(**fields, is_frozen=True).pretrained(params, frozen) == 3
