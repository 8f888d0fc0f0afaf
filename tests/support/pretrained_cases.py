"""Tiny configs of published language models, their weights, and logits of transformers.

Weights are drawn by NumPy from the tensors' names, so that no file is needed. The logits are those
of transformers 5.24.0 with torch 2.13.0 in float32, in ``pretrained_cases.json``: ``python
tests/support/pretrained_cases.py`` prints its lines again.
"""

import copy
import json
import re
import tempfile
import zlib
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from fnet.layers.gated_delta import gated_delta_net
from fnet.layers.mamba import mamba
from fnet.layers.mamba2 import mamba2
from fnet.layers.rg_lru import rg_lru
from fnet.layers.short_conv import short_conv

MIXERS = {
    "mamba": mamba(8, state=3, chunk=4),
    "mamba2": mamba2(8, head=4, state=3, groups=2, chunk=4),
    "gated_delta_net": gated_delta_net(8, heads=4, head_dim=2, groups=2, key_dim=3, chunk=4),
    "rg_lru": rg_lru(8, heads=2),
    "rg_lru_first": rg_lru(8, heads=2, scale_first=False),
    "short_conv": short_conv(8),
}
"""Mixers of published models with a width of 8, which the tests of all mixers share."""

_BASE = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_HEADS = {name: n for name, n in _BASE.items() if name != "num_key_value_heads"}
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14, "model_type": "siglip_vision_model",
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 24, "num_experts_per_tok": 3}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4}
_GEMMA4 = {
    "head_dim": 8, "global_head_dim": 16, "sliding_window": 4, "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 37,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip
_LONGROPE = {
    "type": "longrope", "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.2, 2.0, 4.0, 7.5],
}  # fmt: skip
_MAMBA = {
    "vocab_size": 37, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 3,
}  # fmt: skip
_MAMBA2 = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
_HYBRID = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_d_conv": 3}
_QWEN35 = {
    "linear_num_value_heads": 6, "linear_num_key_heads": 3, "linear_value_head_dim": 8,
    "linear_key_head_dim": 4, "linear_conv_kernel_dim": 3, "head_dim": 16,
    "full_attention_interval": 2, "rope_parameters": {
        "rope_theta": 100.0, "rope_type": "default", "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True},
}  # fmt: skip
_QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
_GRANITE4 = _HYBRID | {
    "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 40, "tie_word_embeddings": True,
}  # fmt: skip
_FALCON_H1 = _HYBRID | {
    "mamba_d_ssm": 64, "attention_in_multiplier": 1.5, "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.6, "key_multiplier": 0.8,
    "ssm_multipliers": [0.5, 0.8, 1.2, 0.9, 0.7], "mlp_multipliers": [0.9, 0.4],
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.5,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

CONFIGS = {
    "llama": _BASE,
    "llama_biases": _BASE
    | {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 12,
       "tie_word_embeddings": True},
    "llama3": _BASE | {"model_type": "llama", "rope_scaling": _LLAMA3, "rope_theta": 500.0},
    "llama_linear_rope": _BASE
    | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama_yarn": _BASE
    | {"model_type": "llama", "rope_scaling": {
        "rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 16,
        "beta_fast": 2.0, "beta_slow": 0.2, "truncate": False, "mscale": 1.2,
        "mscale_all_dim": 0.4}},
    "mistral": _BASE | {"sliding_window": 5, "head_dim": 16},
    "qwen2": _BASE
    | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1,
       "tie_word_embeddings": True},
    "qwen3": _BASE | {"head_dim": 16},
    "qwen3_yarn": _BASE
    | {"model_type": "qwen3", "head_dim": 16, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "gemma": _BASE | {"head_dim": 16},
    "gemma2": _BASE | _GEMMA,
    "gemma3_text": _BASE
    | _GEMMA
    | {"num_hidden_layers": 7, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gpt2": {"vocab_size": 37, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "olmo2": _BASE,
    "phi3": _BASE | {"sliding_window": 6},
    "phi3_partial_rotary": _BASE
    | {"model_type": "phi3", "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    "phi3_longrope": _BASE
    | {"model_type": "phi3", "original_max_position_embeddings": 4, "rope_scaling": _LONGROPE},
    "phi3_longrope_short": _BASE
    | {"model_type": "phi3", "original_max_position_embeddings": 32, "sliding_window": 40,
       "partial_rotary_factor": 0.5,
       "rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 4.0]}},
    "smollm3": _BASE | {"num_hidden_layers": 4},
    "olmo3": _BASE
    | {"num_hidden_layers": 4, "sliding_window": 4, "rope_scaling": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "vaultgemma": _BASE | _GEMMA,
    "exaone4": _BASE | {"num_hidden_layers": 4, "sliding_window": 4, "head_dim": 12},
    "exaone4_full": _BASE | {"model_type": "exaone4", "sliding_window": None,
       "layer_types": ["full_attention"] * 3},
    "helium": _BASE | {"head_dim": 8},
    "ernie4_5": _BASE | {"head_dim": 12, "use_bias": True},
    "glm": _BASE | {"head_dim": 12},
    "glm4": _BASE | {"head_dim": 16, "attention_bias": False},
    "granite": _BASE
    | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
       "logits_scaling": 2.0},
    "seed_oss": _BASE | {"head_dim": 12},
    "stablelm": _BASE | {"use_qkv_bias": True, "num_key_value_heads": 4},
    "starcoder2": _BASE | {"sliding_window": 5},
    "ministral": _BASE | {"head_dim": 16, "sliding_window": 5,
       "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
    "ministral3": _BASE | {"head_dim": 8, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 6,
        "llama_4_scaling_beta": 0.3}},
    "cwm": _BASE | {"sliding_window": 5, "head_dim": 16},
    "cohere": _BASE | {"logit_scale": 0.5},
    "cohere2": _BASE | {"num_hidden_layers": 4, "sliding_window": 5},
    "arcee": _BASE,
    "jais2": _BASE,
    "nemotron": _BASE | {"head_dim": 16},
    "apertus": _BASE,
    "nanochat": _BASE | {"final_logit_softcapping": 2.0},
    "persimmon": _HEADS,
    "phi": _BASE,
    "gpt_neox": _HEADS,
    "gpt_neox_sequential": _HEADS
    | {"model_type": "gpt_neox", "use_parallel_residual": False, "attention_bias": False,
       "rotary_pct": 1.0, "tie_word_embeddings": True},
    "gptj": {"vocab_size": 37, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
       "rotary_dim": 4},
    "gpt_bigcode": {"vocab_size": 37, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "falcon": {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2,
       "num_attention_heads": 4},
    "olmo": _BASE | {"clip_qkv": 0.8},
    "hunyuan_v1_dense": _BASE
    | {"head_dim": 16, "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    "hyperclovax": _BASE | {"residual_multiplier": 0.4, "logits_scaling": 0.5},
    "stablelm_parallel": _BASE
    | {"model_type": "stablelm", "use_parallel_residual": True, "num_key_value_heads": 4},
    "mixtral": _BASE | {"num_local_experts": 5},
    "minimax_m2": _BASE | {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 8, "rotary_dim": 4},
    "qwen2_moe": _BASE
    | _EXPERTS
    | {"shared_expert_intermediate_size": 40, "mlp_only_layers": [1], "num_experts": 5,
       "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3_moe": _BASE
    | _EXPERTS
    | {"head_dim": 16, "norm_topk_prob": True, "decoder_sparse_step": 2, "num_experts": 5},
    "olmoe": _BASE | {"clip_qkv": 0.8, "num_experts": 5, "num_experts_per_tok": 3},
    "flex_olmo": _BASE | {"num_experts": 5, "num_experts_per_tok": 3},
    "granitemoe": _BASE
    | {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.4,
       "logits_scaling": 2.0, "num_local_experts": 5},
    "granitemoeshared": _BASE
    | {"num_local_experts": 5, "shared_intermediate_size": 40},
    "glm4_moe": _BASE
    | _EXPERTS
    | {"n_routed_experts": 5, "routed_scaling_factor": 1.5, "use_qk_norm": True},
    "dots1": _BASE
    | _EXPERTS
    | {"n_routed_experts": 5, "n_shared_experts": 2, "first_k_dense_replace": 1,
       "num_hidden_layers": 2, "norm_topk_prob": True},
    "ernie4_5_moe": _BASE
    | {"moe_num_experts": 5, "moe_k": 3, "moe_intermediate_size": 24, "use_bias": True,
       "tie_word_embeddings": False, "head_dim": 8},
    "hunyuan_v1_moe": _BASE | {"num_experts": 5, "moe_topk": 2, "head_dim": 8},
    "gpt_oss": _BASE
    | {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 8, "sliding_window": 4,
       "num_hidden_layers": 2, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "truncate": False,
        "original_max_position_embeddings": 16}},
    "gemma3": {"text_config": _BASE | _GEMMA | {"model_type": "gemma3_text"}, "vision_config": _VISION, "mm_tokens_per_image": 4},
    "gemma4_text": _BASE | _GEMMA4,
    "gemma4_keys": _BASE
    | _GEMMA4
    | {"model_type": "gemma4_text", "num_hidden_layers": 6, "num_kv_shared_layers": 3,
       "use_double_wide_mlp": True, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
       "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
       "final_logit_softcapping": 2.0},
    "gemma4_plain": _BASE
    | _GEMMA4
    | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "tie_word_embeddings": False},
    "gemma4_experts": _BASE
    | _GEMMA4
    | {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "enable_moe_block": True,
       "num_experts": 5, "top_k_experts": 3, "moe_intermediate_size": 24},
    "gemma4_unified_text": _BASE
    | {n: v for n, v in _GEMMA4.items() if "per_layer" not in n}
    | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma4_unified": {
        "text_config": _BASE
        | {n: v for n, v in _GEMMA4.items() if "per_layer" not in n}
        | {"model_type": "gemma4_unified_text"},
        "vision_config": {"model_type": "gemma4_unified_vision", "mm_embed_dim": 32, "mm_posemb_size": 4, "patch_size": 2, "output_proj_dims": 32}},
    "gemma4": {
        "text_config": _BASE | _GEMMA4 | {"model_type": "gemma4_text"},
        "vision_config": _VISION | {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}},
    "mistral3": {
        "tie_word_embeddings": True,
        "text_config": _BASE | {"model_type": "mistral", "head_dim": 8, "rope_theta": 100.0},
        "vision_config": _VISION | {"model_type": "pixtral", "head_dim": 8}},
    "mamba": _MAMBA,
    "mamba_biases": _MAMBA
    | {"model_type": "mamba", "use_bias": True, "use_conv_bias": False, "time_step_rank": 3,
       "tie_word_embeddings": False},
    "falcon_mamba": _MAMBA,
    "mamba2": _MAMBA | _MAMBA2,
    "mamba2_groups": _MAMBA
    | _MAMBA2
    | {"model_type": "mamba2", "n_groups": 2, "use_bias": True, "use_conv_bias": False,
       "time_step_limit": [0.3, 0.9], "tie_word_embeddings": True},
    "recurrent_gemma": _BASE | {"attention_window_size": 5, "lru_width": 40, "num_hidden_layers": 4},
    "lfm2": _BASE
    | {"block_multiple_of": 8, "conv_bias": True, "layer_types": ["conv", "full_attention", "conv"],
       "tie_word_embeddings": False},
    "lfm2_moe": _BASE
    | _EXPERTS
    | {"num_experts": 6, "num_dense_layers": 1, "routed_scaling_factor": 1.5,
       "layer_types": ["full_attention", "conv", "full_attention"]},
    "granitemoehybrid": _BASE
    | _GRANITE4
    | {"num_local_experts": 5, "num_experts_per_tok": 3, "attention_multiplier": 0.3,
       "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    "granitemoehybrid_dense": _BASE
    | _GRANITE4
    | {"model_type": "granitemoehybrid", "num_local_experts": 0, "mamba_n_groups": 2,
       "position_embedding_type": "rope", "mamba_proj_bias": True, "mamba_conv_bias": False},
    "falcon_h1": _BASE | _FALCON_H1,
    "falcon_h1_norm": _BASE
    | _FALCON_H1
    | {"model_type": "falcon_h1", "mamba_rms_norm": True, "mamba_norm_before_gate": False,
       "mamba_d_ssm": None, "mamba_n_groups": 2},
    "qwen3_5_text": _BASE | _QWEN35,
    "qwen3_5_moe_text": _BASE
    | _QWEN35
    | _EXPERTS
    | {"num_experts": 5, "shared_expert_intermediate_size": 20, "tie_word_embeddings": True},
    "qwen3_5": {"text_config": _BASE | _QWEN35, "vision_config": _QWEN_VISION},
    "qwen3_5_moe": {
        "text_config": _BASE | _QWEN35 | _EXPERTS | {"num_experts": 5, "shared_expert_intermediate_size": 20},
        "vision_config": _QWEN_VISION},
    "bamba": _BASE | _HYBRID | {"attn_layer_indices": [1]},
}  # fmt: skip
CONFIGS = {name: {"model_type": name} | config for name, config in CONFIGS.items()}

BUFFERS = re.compile(r"act_fn\.(beta|eps)$")
"""Tensors in files that are constants."""

TOKENS = np.random.default_rng(0).integers(0, 37, (2, 17))


LOGITS = json.loads(Path(__file__).with_suffix(".json").read_text())
"""The first logits at the last of the second row's `TOKENS`."""


def file_shapes(model):
    """Shapes of a model's tensors by name, without those that may be missing."""
    return {t.name: t.file_shape for t in model.tensors if not t.optional}


def weights(shapes):
    """Deterministic weights {name: array} for shapes by name."""

    def draw(name, shape):
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        scale = 0.5 if len(shape) == 1 else shape[-1] ** -0.5
        return (scale * rng.standard_normal(shape)).astype(np.float32)

    return {name: draw(name, shape) for name, shape in shapes.items()}


def peer(name):
    """The model of transformers with these weights, read from files, and its config as a dict."""
    import torch
    import transformers

    config = copy.deepcopy(CONFIGS[name])  # transformers changes nested options in place
    config = transformers.AutoConfig.for_model(
        config.pop("model_type"), pad_token_id=0, bos_token_id=1, eos_token_id=2, **config
    )
    auto = transformers.AutoModelForCausalLM
    if "vision_config" in CONFIGS[name]:
        auto = transformers.AutoModelForImageTextToText
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        auto.from_config(config).save_pretrained(folder)
        saved = load_file(path)
        drawn = weights({n: a.shape for n, a in saved.items() if not BUFFERS.search(n)})
        save_file(saved | drawn, path, {"format": "pt"})
        model = auto.from_pretrained(folder, dtype=torch.float32)
        return model.eval(), json.loads(Path(folder, "config.json").read_text()), saved | drawn


if __name__ == "__main__":
    import sys

    import torch

    for name in sys.argv[1:] or CONFIGS:
        model, _, _ = peer(name)
        logits = model(torch.tensor(TOKENS)).logits.detach().numpy()
        print(f'  "{name}": {[round(float(v), 5) for v in logits[1, -1, :4]]},')
