"""Folders of tiny published models, with random weights."""

import json
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parent / "support"))  # for scripts outside of pytest
from pretrained_cases import file_shapes, weights
from safetensors.numpy import save_file

from fnet.interop.huggingface import build_model

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 256,
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
"""A model whose tokens are bytes."""

VIT = {
    "model_type": "vit", "architectures": ["ViTForImageClassification"], "hidden_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "image_size": 16,
    "patch_size": 8, "id2label": {str(i): str(i) for i in range(7)},
}  # fmt: skip
"""An image network with a classifier for 7 classes."""


def tensors_of(config):
    """Random tensors of a model, by name."""
    return weights(file_shapes(build_model(config)))


def write_folder(path, config=LLAMA, dtype=np.float32, shards=1, tensors=None):
    """Write config.json and safetensors files, and return the tensors."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(config) if tensors is None else tensors
    tensors = {name: a.astype(dtype) for name, a in tensors.items()}
    if shards == 1:
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
        return tensors
    names = sorted(tensors)
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        save_file({n: tensors[n] for n in names[i::shards]}, path / file)
        weight_map |= dict.fromkeys(names[i::shards], file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors


def write_tokenizer(path):
    """Write a tokenizer whose tokens are bytes."""
    import tokenizers

    bytes_ = tokenizers.pre_tokenizers.ByteLevel
    vocabulary = {c: i for i, c in enumerate(sorted(bytes_.alphabet()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = bytes_(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path))
