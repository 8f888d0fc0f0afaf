"""Names of tensors, as tables and as functions of what families have in common."""

from fnet.interop.huggingface.checkpoint import Names


def table(text: str) -> Names:
    """Read names of tensors from lines ``PATH NAME`` or ``PATH NAME LAYOUT``; see `Names`.

    >>> table("blocks/*/mixer/output  h.*.attn.c_proj  ab")
    {'blocks/*/mixer/output': ('h.*.attn.c_proj', 'ab')}
    """
    rows = [line.split() for line in text.splitlines() if line.strip()]
    return {path: name[0] if len(name) == 1 else (name[0], name[1]) for path, *name in rows}


def norms(**names: str) -> Names:
    """Name norms of blocks by branch, as in ``mixer="input_layernorm"``."""
    return {f"blocks/*/{part}_norm": f"model.layers.*.{name}" for part, name in names.items()}


def qk_norms(query: str, key: str) -> Names:
    """Name the norms of queries and keys."""
    names = {"query": query, "key": key}
    return {f"blocks/*/mixer/{p}_norm": f"model.layers.*.self_attn.{n}" for p, n in names.items()}


def mlp(expand: str, contract: str, layer: str = "model.layers.*.mlp") -> Names:
    """Name the two layers of a feed-forward layer: without a gate, or with one in the first."""
    names = {"expand": expand, "contract": contract}
    return {f"blocks/*/feed_forward/{path}": f"{layer}.{name}" for path, name in names.items()}


def state_space(layer: str) -> Names:
    """Name what the layers of state space models have; each of them has some of it."""
    names = {"in": "in_proj", "out": "out_proj", "norm": "norm", "dt_bias": "dt_bias"}
    names |= {"A_log": "A_log", "D": "D"}
    conv: Names = {"blocks/*/mixer/conv": (f"{layer}.conv1d", "b1a")}
    return conv | {f"blocks/*/mixer/{path}": f"{layer}.{name}" for path, name in names.items()}


def gated(path: str, layer: str, *names: str) -> Names:
    """Name the three parts of a gated feed-forward layer at a path."""
    names = names or ("gate_proj", "up_proj", "down_proj")
    parts = zip(("gate", "up", "contract"), names, strict=True)
    return {f"blocks/*/feed_forward{path}/{p}": f"model.layers.*.{layer}.{n}" for p, n in parts}


LLAMA_NAMES = table("""
embedding                       model.embed_tokens
blocks/*/mixer/query            model.layers.*.self_attn.q_proj
blocks/*/mixer/key              model.layers.*.self_attn.k_proj
blocks/*/mixer/value            model.layers.*.self_attn.v_proj
blocks/*/mixer/query_key_value  model.layers.*.self_attn.qkv_proj
blocks/*/mixer/query_norm       model.layers.*.self_attn.q_norm
blocks/*/mixer/key_norm         model.layers.*.self_attn.k_norm
blocks/*/mixer/output           model.layers.*.self_attn.o_proj
blocks/*/feed_forward/gate      model.layers.*.mlp.gate_proj
blocks/*/feed_forward/up        model.layers.*.mlp.up_proj
blocks/*/feed_forward/expand    model.layers.*.mlp.gate_up_proj
blocks/*/feed_forward/contract  model.layers.*.mlp.down_proj
norm                            model.norm
head                            lm_head
""")
"""Names of Llama, fused or not, but for the norms of blocks."""

BEFORE = norms(mixer="input_layernorm", feed_forward="post_attention_layernorm")
"""Norms before mixer and feed-forward layer."""

AFTER = norms(mixer_post="post_attention_layernorm", feed_forward_post="post_feedforward_layernorm")
"""Norms after mixer and feed-forward layer."""

AROUND = AFTER | norms(mixer="input_layernorm", feed_forward="pre_feedforward_layernorm")
"""Norms before and after both."""
