"""Adapters to flax (`linen`, `nnx`) and `jax_privacy`; weights of torch, Hugging Face and PEFT.

Each is imported on first use, so that the others need not be installed. torch is never needed.
"""

from typing import TYPE_CHECKING

from fnet import lazy

if TYPE_CHECKING:
    from fnet.interop import huggingface as huggingface
    from fnet.interop import jax_privacy as jax_privacy
    from fnet.interop import linen as linen
    from fnet.interop import nnx as nnx
    from fnet.interop import peft as peft
    from fnet.interop import torch as torch
    from fnet.interop.huggingface import from_huggingface as from_huggingface
    from fnet.interop.huggingface import to_huggingface as to_huggingface
    from fnet.interop.peft import from_peft as from_peft
    from fnet.interop.peft import to_peft as to_peft
    from fnet.interop.torch import from_torch as from_torch
    from fnet.interop.torch import to_torch as to_torch
else:
    lazy.import_names_late(__name__)
