"""Walk transformers' list of causal language models: loads, or refused with the reason.

``python -m tests.causal_models [MODEL_TYPE ...]`` prints one line per type. It needs transformers and
torch. Files and config are what transformers writes for the small configs of the tests.
"""

import contextlib
import io
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from pretrained_cases import CONFIGS, peer

import fnet
from fnet.interop.huggingface import FAMILIES


def outcome(model_type: str) -> str:
    """Return ``loads``, or why not."""
    if model_type not in FAMILIES:
        return "refused: no row for this model_type"
    try:
        _, config, tensors = peer(
            next(n for n, c in CONFIGS.items() if c["model_type"] == model_type)
        )
        fnet.interop.from_huggingface(config, tensors)
    except (TypeError, ValueError) as error:
        return "refused: " + " ".join(str(error).split())[:150]
    return "loads"


def main() -> None:
    """Print a line per model type, and how many load."""
    import transformers

    transformers.logging.set_verbosity_error()
    listed = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    count: Counter[str] = Counter()
    for model_type in sys.argv[1:] or listed:
        with contextlib.redirect_stderr(io.StringIO()):
            found = outcome(model_type)
        count[found.partition(":")[0]] += 1
        print(f"{model_type}: {found}", flush=True)
    print(f"transformers {transformers.__version__}: {dict(count)}")


if __name__ == "__main__":
    main()
