"""The config.json of well-known models, without fields of tokens and generation."""

import json
from pathlib import Path

_CONFIGS = json.loads(Path(__file__).with_suffix(".json").read_text())
LLAMA_3_2_1B, LLAMA_3_8B, QWEN_2_5_0_5B = (
    _CONFIGS[name] for name in ("LLAMA_3_2_1B", "LLAMA_3_8B", "QWEN_2_5_0_5B")
)
