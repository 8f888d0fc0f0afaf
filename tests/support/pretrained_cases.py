"""Tiny configs of published language models, their weights, and logits of transformers.

Weights are drawn by NumPy from the tensors' names, so that no file is needed. The logits are those
of transformers 5.24.0 with torch 2.13.0 in float32: ``python tests/support/pretrained_cases.py`` prints
them again.
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


LOGITS = {
    "llama": [0.04555, -0.4396, 0.56153, 0.53312],
    "llama_biases": [0.67957, -0.68507, 0.18122, 0.15433],
    "llama3": [0.04762, -0.41705, 0.50241, 0.5511],
    "llama_linear_rope": [0.09887, -0.52251, 0.52149, 0.47321],
    "llama_yarn": [0.03052, -0.42911, 0.53541, 0.545],
    "mistral": [0.22955, -0.66024, -0.02331, -0.59641],
    "qwen2": [-0.38528, 0.03354, 0.13668, -0.16946],
    "qwen3": [0.06947, -0.23504, 0.37253, 0.59936],
    "qwen3_yarn": [0.04786, -0.21686, 0.37821, 0.60522],
    "gemma": [0.16323, 0.59345, -0.16648, 1.24983],
    "gemma2": [1.32298, -0.62232, 0.5951, 0.10837],
    "gemma3_text": [1.64514, -0.84052, -0.97, 0.81972],
    "gpt2": [0.25569, -0.69439, 0.04851, -0.04677],
    "olmo2": [-0.20899, -0.03841, -0.31594, 0.37688],
    "phi3": [0.09342, -0.44882, 0.37915, -0.06388],
    "phi3_partial_rotary": [-0.09559, 0.1707, 0.14641, -0.1359],
    "phi3_longrope": [-0.05778, -0.70545, 0.5068, 0.21812],
    "phi3_longrope_short": [-0.02807, -0.66409, 0.62674, 0.13441],
    "smollm3": [-0.07247, 0.43253, -0.5663, -0.07458],
    "olmo3": [-0.00973, -0.14238, 0.15882, 0.36106],
    "vaultgemma": [0.9161, -0.46178, 0.57965, 1.00345],
    "exaone4": [-0.24924, -0.0055, 0.22091, 0.16445],
    "exaone4_full": [-0.30049, 0.32912, -0.15569, 0.31867],
    "helium": [0.00579, -0.42149, 0.52835, 0.59861],
    "ernie4_5": [0.68118, -0.68128, 0.16216, 0.14098],
    "glm": [-0.10978, -0.14615, 0.16049, -0.12785],
    "glm4": [0.54099, 0.22768, 0.26355, 0.0542],
    "granite": [0.04657, -0.38344, 0.41583, 0.11446],
    "seed_oss": [-0.13502, -0.06247, 0.12448, 0.00789],
    "stablelm": [0.00928, 0.10799, -0.15705, -0.73635],
    "starcoder2": [-0.76783, -0.79479, 0.52516, 1.19594],
    "ministral": [0.2953, -0.68676, 0.48611, -0.06943],
    "ministral3": [0.03284, -0.44823, 0.55698, 0.52746],
    "cwm": [0.04655, -0.74246, 0.50342, 0.03388],
    "cohere": [0.26616, 0.29451, -0.11382, -0.04326],
    "cohere2": [-0.02913, 0.03351, -0.01824, -0.02611],
    "arcee": [-0.19734, -0.82834, 0.92977, -0.2382],
    "jais2": [-0.44377, 1.07817, -0.34495, 0.22374],
    "nemotron": [-0.73138, -0.09086, 0.15732, 1.18951],
    "apertus": [-0.12824, 0.10851, 0.33106, -0.16759],
    "nanochat": [0.04195, 0.08402, 1.40793, 0.10495],
    "persimmon": [1.24848, -0.48881, -0.32771, 1.05066],
    "phi": [1.36087, -1.49357, -0.15054, 0.84058],
    "gpt_neox": [0.22194, -0.15209, 0.52093, -0.82002],
    "gpt_neox_sequential": [-0.39269, 0.64703, 0.12112, 0.33585],
    "gptj": [1.09002, -1.29744, 0.34059, -0.80258],
    "gpt_bigcode": [0.46671, -0.84105, 0.08662, 0.47342],
    "falcon": [-0.39713, 0.12312, -1.28936, -0.42039],
    "olmo": [-0.39389, -1.05542, 0.28526, -0.01719],
    "hunyuan_v1_dense": [0.01749, -0.45854, 0.30903, 0.50134],
    "hyperclovax": [-0.19249, 0.07658, 0.1818, 0.34682],
    "stablelm_parallel": [-0.11652, 0.47588, -0.27748, -0.48531],
    "mixtral": [-0.27841, -0.30507, 0.70724, 0.29023],
    "minimax_m2": [-0.30368, -0.17002, 0.73264, 0.4118],
    "qwen2_moe": [-0.10602, -0.89854, 0.64557, -0.14732],
    "qwen3_moe": [0.18359, -0.04928, 0.52845, 0.41816],
    "olmoe": [-0.16715, -0.7467, 0.86054, 0.11546],
    "flex_olmo": [0.25744, -0.81381, 0.11217, -0.99404],
    "granitemoe": [0.00958, -0.33192, 0.48416, 0.10363],
    "granitemoeshared": [0.10138, -0.766, 0.28429, 0.05831],
    "glm4_moe": [-0.1179, -0.50925, 0.39427, 0.59993],
    "dots1": [0.28938, -0.80727, 0.45563, 0.38575],
    "ernie4_5_moe": [0.07244, -0.89519, -0.19258, -0.15002],
    "hunyuan_v1_moe": [-0.19436, -0.82095, 0.6985, 0.15588],
    "gpt_oss": [0.5027, -0.59027, -0.20444, -0.0946],
    "gemma3": [-2.07442, -0.38655, -1.14332, -0.98083],
    "gemma4_text": [0.7913, 0.43214, -0.58053, 0.49634],
    "gemma4_keys": [-0.91177, -0.28692, -0.38456, 0.10137],
    "gemma4_plain": [-0.04786, 0.2496, 0.55111, 0.4089],
    "gemma4_experts": [0.2237, 0.00797, 0.25741, -0.10574],
    "gemma4_unified_text": [-0.458, -0.39675, -0.2026, 0.39421],
    "gemma4_unified": [0.49142, 0.2475, -0.46421, -0.22904],
    "gemma4": [0.85504, 0.18979, -0.42161, -0.43146],
    "mistral3": [-0.43371, 0.80918, 0.18752, -0.43931],
    "mamba": [0.21, -0.09257, 0.11762, -0.10448],
    "mamba_biases": [0.40397, -0.35873, 0.26824, -0.06552],
    "falcon_mamba": [0.351, -0.03567, 0.08074, -0.1035],
    "mamba2": [-0.07533, -0.60657, -0.46896, -0.45525],
    "mamba2_groups": [1.19455, -0.82204, 0.22511, -4e-05],
    "recurrent_gemma": [-2.90876, 0.84921, -1.17602, -1.91302],
    "lfm2": [0.06264, 0.29815, -0.11381, -0.01912],
    "lfm2_moe": [-0.05518, -0.63877, -0.42996, 0.01698],
    "falcon_h1": [-0.09606, -0.07717, -0.87854, -0.04537],
    "falcon_h1_norm": [-0.10301, 0.10408, -0.50817, 0.13888],
    "granitemoehybrid": [0.12293, 0.12022, -0.18361, 0.25249],
    "granitemoehybrid_dense": [0.0818, -0.3086, -0.32041, 0.1809],
    "qwen3_5_text": [0.23072, -1.5517, -0.639, -0.75278],
    "qwen3_5_moe_text": [0.08727, -0.347, 0.19514, -0.02522],
    "qwen3_5": [-1.11616, 0.30452, 0.21586, -0.15054],
    "qwen3_5_moe": [-0.28902, -0.12717, 0.5411, -1.46438],
    "bamba": [-0.01953, -0.56573, 0.01136, 0.33577],
}
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
        print(f'    "{name}": {[round(float(v), 5) for v in logits[1, -1, :4]]},')
