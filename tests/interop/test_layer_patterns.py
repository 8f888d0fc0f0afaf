"""Which blocks of published language models have a window, experts, a recurrence or no rotation."""

from pretrained_cases import CONFIGS

from fnet.interop.huggingface import build_model

SLIDING, FULL = "sliding_attention", "full_attention"


def pattern(name, blocks=8, **options):
    """A letter per block: w for a window, r for a recurrence, otherwise f; capital for experts.

    A dot after it says that positions are not rotated.
    """
    config = {n: v for n, v in CONFIGS[name].items() if n != "layer_types"}
    kinds = build_model(config | {"num_hidden_layers": blocks} | options).kinds
    letters = ["r" if k.recurs else "f" if k.window is None else "w" for k in kinds]
    return "".join(
        (letter.upper() if kind.sparse else letter) + "." * (not kind.rotates and not kind.recurs)
        for letter, kind in zip(letters, kinds, strict=True)
    )


# The formulas of transformers' configuration and modeling files, written out for eight blocks.
def test_blocks_are_those_of_transformers():
    for name, options, expected in (
        ("qwen3_moe", {"decoder_sparse_step": 3}, "ffFffFff"),
        ("qwen3_moe", {"decoder_sparse_step": 1, "mlp_only_layers": [0, 6]}, "fFFFFFfF"),
        ("dots1", {"first_k_dense_replace": 3}, "fffFFFFF"),
        ("glm4_moe", {"first_k_dense_replace": 0}, "FFFFFFFF"),
        ("ernie4_5_moe", {}, "fFFFFFFF"),
        ("ernie4_5_moe", {"moe_layer_start_index": 2, "moe_layer_end_index": 5}, "ffFFFFff"),
        ("ernie4_5_moe", {"moe_layer_interval": 3, "moe_layer_start_index": 3}, "fffffFff"),
        ("ernie4_5_moe", {"moe_layer_interval": 2, "moe_layer_end_index": 7}, "fFfFfFfF"),
        ("mixtral", {}, "FFFFFFFF"),
        ("gemma2", {"sliding_window": 4}, "wfwfwfwf"),
        ("gemma3_text", {"sliding_window": 4, "sliding_window_pattern": 3}, "wwfwwfww"),
        ("cohere2", {"sliding_window": 4, "sliding_window_pattern": 4}, "wwwf.wwwf."),
        ("smollm3", {"no_rope_layer_interval": 3}, "fff.fff.ff"),
        ("smollm3", {"no_rope_layers": [1, 0] * 4}, "ff.ff.ff.ff."),
        ("exaone4", {"sliding_window": 4}, "wwwf.wwwf."),
        ("exaone4", {"sliding_window": 4, "sliding_window_pattern": "LLG"}, "wwf.wwf.ww"),
        ("exaone4", {"sliding_window": None}, "ffffffff"),
        ("gpt_oss", {}, "WFWFWFWF"),
        ("mistral", {"sliding_window": 4}, "wwwwwwww"),
        ("mistral", {"sliding_window": None}, "ffffffff"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 5}, "fffffwww"),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 4, "max_window_layers": 5}, "ffffffff"),
        ("gemma2", {"sliding_window": 4, "layer_types": [SLIDING] * 7 + [FULL]}, "wwwwwwwf"),
        ("qwen3_5_text", {"full_attention_interval": 4}, "rrrfrrrf"),
    ):  # fmt: skip
        assert pattern(name, **options) == expected
