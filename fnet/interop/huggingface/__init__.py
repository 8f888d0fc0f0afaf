"""Published models of Hugging Face: a ``config.json`` and tensors in safetensors files.

Nothing is downloaded, and transformers is not needed.
"""

from fnet.interop.huggingface.family import FAMILIES as FAMILIES
from fnet.interop.huggingface.family import Family as Family
from fnet.interop.huggingface.family import register as register
from fnet.interop.huggingface.loading import build_model as build_model
from fnet.interop.huggingface.loading import from_huggingface as from_huggingface
from fnet.interop.huggingface.loading import to_huggingface as to_huggingface
from fnet.interop.huggingface.options import Option as Option
