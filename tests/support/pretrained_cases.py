"""Tiny configs of published language models, their weights, and logits of transformers.

Weights are drawn by NumPy from the tensors' names, so that no file is needed. The logits are those
of transformers 5.24.0 with torch 2.13.0 in float32: ``python tests/support/pretrained_cases.py`` prints
them again.
"""

import copy
import zlib

import numpy as np

_BASE = {
    "vocab_size": 37, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 4}
_LONGROPE = {
    "type": "longrope", "short_factor": [1.0, 1.1, 1.5, 2.0], "long_factor": [1.2, 2.0, 4.0, 7.5],
}  # fmt: skip
_MAMBA = {
    "vocab_size": 37, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2, "conv_kernel": 3,
}  # fmt: skip
_MAMBA2 = {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4}
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
}  # fmt: skip
CONFIGS = {name: {"model_type": name} | config for name, config in CONFIGS.items()}

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
    "mamba": [0.21, -0.09257, 0.11762, -0.10448],
    "mamba_biases": [0.40397, -0.35873, 0.26824, -0.06552],
    "falcon_mamba": [0.351, -0.03567, 0.08074, -0.1035],
    "mamba2": [-0.07533, -0.60657, -0.46896, -0.45525],
    "mamba2_groups": [1.19455, -0.82204, 0.22511, -4e-05],
    "recurrent_gemma": [-2.90876, 0.84921, -1.17602, -1.91302],
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
    """The model of transformers with these weights, and its own config as a dict."""
    import torch
    import transformers

    config = copy.deepcopy(CONFIGS[name])  # transformers changes nested options in place
    config = transformers.AutoConfig.for_model(
        config.pop("model_type"), pad_token_id=0, bos_token_id=1, eos_token_id=2, **config
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    state = model.state_dict()
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    drawn = weights({n: tuple(a.shape) for n, a in state.items() if n not in tied})
    model.load_state_dict({n: torch.tensor(a) for n, a in drawn.items()}, strict=False)
    return model, config.to_dict(), drawn


if __name__ == "__main__":
    import torch

    for name in CONFIGS:
        model, _, _ = peer(name)
        logits = model(torch.tensor(TOKENS)).logits.detach().numpy()
        print(f'    "{name}": {[round(float(v), 5) for v in logits[1, -1, :4]]},')
