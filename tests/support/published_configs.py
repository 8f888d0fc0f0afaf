"""The config.json of well-known models, without fields of tokens and generation."""

_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
    "num_key_value_heads": 8, "num_attention_heads": 32, "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0, "vocab_size": 128256,
}  # fmt: skip

LLAMA_3_2_1B = _LLAMA | {
    "head_dim": 64, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
    "max_position_embeddings": 131072, "tie_word_embeddings": True,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
}  # fmt: skip

LLAMA_3_8B = _LLAMA | {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "max_position_embeddings": 8192, "tie_word_embeddings": False, "rope_scaling": None,
}  # fmt: skip

QWEN_2_5_0_5B = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu",
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "max_window_layers": 24, "use_sliding_window": False, "sliding_window": 32768,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": True,
    "vocab_size": 151936,
}  # fmt: skip
