"""Published language models give the logits, the tokens and the tensors of transformers."""

import functools
import re
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pretrained_image_cases
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from pretrained_cases import CONFIGS, LOGITS, TOKENS, file_shapes, peer, weights

import fnet
from fnet.interop.huggingface import FAMILIES, build_model
from fnet.interop.huggingface.checkpoint import Tensor
from fnet.interop.huggingface.decoders import _xielu


@functools.cache
def loaded(name):
    tensors = weights(file_shapes(build_model(CONFIGS[name])))
    model, params = fnet.interop.from_huggingface(CONFIGS[name], tensors)
    return model, params, tensors


def test_every_family_has_a_case():
    cases = CONFIGS | pretrained_image_cases.CONFIGS
    assert {c["model_type"] for c in cases.values() if "model_type" in c} == FAMILIES.keys()


def test_the_pages_list_every_family():
    docs = Path(__file__).parents[2] / "docs"
    pages = [(docs / name).read_text() for name in ("language_models.md", "weights.md")]
    rows = "\n".join(line for page in pages for line in page.splitlines() if line[:2] == "| ")
    assert {f for f in FAMILIES if f"`{f}`" not in rows} == set()


# Together, they run all lines that read a config.
QUICK = {
    *("dots1", "ernie4_5_moe", "falcon_h1_norm", "gemma3", "gemma4_experts", "gpt2", "gpt_oss"),
    *("granitemoehybrid_dense", "lfm2_moe", "minimax_m2", "ministral3", "nanochat", "olmo"),
    *("qwen2_moe", "qwen3_5_moe_text", "recurrent_gemma"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in CONFIGS]
)
def test_logits_match_those_of_transformers(name):
    model, params, tensors = loaded(name)
    logits, _ = jax.jit(lambda p: model.apply(p, {}, TOKENS, train=False))(params)
    np.testing.assert_allclose(logits[1, -1, :4], LOGITS[name], atol=2e-5)
    chex.assert_trees_all_equal(fnet.interop.to_huggingface(model, params), tensors)


def gradients_equal(theirs, model, params, atol):
    """Compare the gradient of a loss for all tensors that torch has under the name in the file."""
    import torch

    labels = np.roll(TOKENS, -1, axis=1)
    logits = theirs(torch.tensor(TOKENS)).logits
    torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]), torch.tensor(labels).reshape(-1)
    ).backward()

    def loss(params):
        return model.losses(params, {}, TOKENS, labels, train=True)[0].mean()

    grads = fnet.interop.to_huggingface(model, jax.jit(jax.grad(loss))(params))
    grads = {
        n.replace("language_model.model.", "model.language_model."): g for n, g in grads.items()
    }
    torch_grads = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    pairs = [(torch_grads[n].numpy(), g) for n, g in grads.items() if n in torch_grads]
    largest = max(np.abs(g).max() for g, _ in pairs)
    assert len(pairs) > len(grads) / 4
    for expected, got in pairs:
        # torch gives the embedding of the padding token 0 no gradient
        rows = slice(1, None) if expected.shape[0] == 37 else slice(None)
        np.testing.assert_allclose(got[rows], expected[rows], rtol=1e-4, atol=atol * largest)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_all_logits_and_greedy_text_match_transformers(name):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    theirs, config, tensors = peer(name)
    expected = theirs(torch.tensor(TOKENS)).logits.detach().numpy()
    model, params = fnet.interop.from_huggingface(config, tensors)
    logits, _ = jax.jit(lambda p: model.apply(p, {}, TOKENS, train=False))(params)
    assert np.abs(logits - expected).max() <= 1e-5 * np.abs(expected).max()
    exported = fnet.interop.to_huggingface(model, params)
    chex.assert_trees_all_equal(exported, {name: tensors[name] for name in exported})
    # Keys near 0 are normalized. In float64, the two differ by 1e-7.
    gradients_equal(theirs, model, params, 2e-4 if name.startswith("qwen3_5") else 1e-5)

    lengths = 3, 11  # the context of phi3_longrope is 4
    tokens = fnet.generate(
        model,
        params,
        {},
        TOKENS[:, : max(lengths)],
        jax.random.key(0),
        10,
        prompt_lengths=lengths,
        temperature=0.0,
        repetition_penalty=1.1,
    )
    # With a cache transformers ignores time_step_limit.
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
    options |= {"repetition_penalty": 1.1, "use_cache": name != "mamba2_groups"}
    for row, n in enumerate(lengths):
        prompt = torch.tensor(TOKENS[row : row + 1, :n])
        text = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0, n:]
        np.testing.assert_array_equal(tokens[row], text.numpy())


def test_sizes_of_delta_nets_that_a_config_leaves_out_are_those_of_transformers():
    config = {n: v for n, v in CONFIGS["qwen3_5_text"].items() if not n.startswith("linear_")}
    shapes = file_shapes(build_model(config))
    values, keys, width = 32 * 128, 16 * 128, config["hidden_size"]
    block = "model.layers.0.linear_attn."
    assert shapes[block + "in_proj_qkv.weight"] == (2 * keys + values, width)
    assert shapes[block + "conv1d.weight"] == (2 * keys + values, 1, 4)
    assert shapes[block + "norm.weight"] == (128,)


@pytest.mark.parametrize(
    ("options", "hidden"),
    [({}, 32), ({"block_auto_adjust_ff_dim": False}, 48), ({"block_ffn_dim_multiplier": 1.5}, 48)],
)
def test_hidden_units_of_lfm2_are_a_multiple_of_two_thirds(options, hidden):
    config = CONFIGS["lfm2"] | {"block_ff_dim": 48, "block_multiple_of": 16} | options
    shapes = file_shapes(build_model(config))
    assert shapes["model.layers.0.feed_forward.w1.weight"] == (hidden, config["hidden_size"])


def test_xielu_is_its_formula():
    layer, x = _xielu(), np.linspace(-3, 3, 13)
    initial, _ = layer.init(jax.random.key(0))
    params = {"alpha_p": jnp.full(1, 0.3), "alpha_n": jnp.full(1, -0.7)}
    factors = np.log1p(np.exp(0.3)), 0.5 + np.log1p(np.exp(-0.7))
    for given, (positive, negative) in ((params, factors), (initial, (0.8, 0.8))):
        curve = np.where(x > 0, positive * x**2, negative * (np.expm1(np.minimum(x, -1e-6)) - x))
        y, _ = layer.apply(given, {}, jnp.float32(x), train=True)
        np.testing.assert_allclose(y, curve + 0.5 * x, rtol=1e-5, atol=1e-5)


def test_fused_losses_match_the_logits():
    model, params, _ = loaded("gemma3_text")
    labels = np.roll(TOKENS, -1, axis=1)
    losses, _ = jax.jit(lambda p: model.losses(p, {}, TOKENS, labels, train=True))(params)
    logits, _ = jax.jit(lambda p: model.apply(p, {}, TOKENS, train=False))(params)
    expected = -np.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    chex.assert_trees_all_close(losses, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma2", "mamba2_groups"])
def test_bfloat16_tensors_stay_bfloat16(name):
    _, _, tensors = loaded(name)
    tensors = {name: a.astype(jnp.bfloat16) for name, a in tensors.items()}
    model, params = fnet.interop.from_huggingface(CONFIGS[name], tensors)
    assert {a.dtype for a in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    logits, _ = jax.jit(lambda p: model.apply(p, {}, TOKENS, train=False))(params)
    assert logits.dtype == jnp.bfloat16
    np.testing.assert_allclose(logits[1, -1, :4], LOGITS[name], atol=0.1)
    chex.assert_trees_all_equal(fnet.interop.to_huggingface(model, params), tensors)


@pytest.mark.parametrize("name", ["mamba_biases", "gemma4_keys"])
def test_decoding_and_packing_give_the_logits_of_the_sequence(name):
    model, params, _ = loaded(name)
    apply = jax.jit(lambda p, tokens, **given: model.apply(p, {}, tokens, train=False, **given)[0])
    logits = apply(params, TOKENS)
    segments = np.array([[1] * 6 + [2] * 11, [3] * 9 + [4] * 8])
    packed = apply(params, TOKENS, segments=segments)
    chex.assert_trees_all_close(packed[0, :6], logits[0, :6], atol=2e-5)
    chex.assert_trees_all_close(packed[0, 6:], apply(params, TOKENS[:1, 6:])[0], atol=2e-5)

    extend = jax.jit(lambda p, cache, tokens, at: model.decode.extend(p, {}, cache, tokens, at))
    cache = model.decode.init_cache(2, 17)
    for first, last in ((0, 7), (7, 8), (8, 9)):
        got, cache = extend(params, cache, TOKENS[:, first:last], first)
        chex.assert_trees_all_close(got, logits[:, last - 1], atol=2e-5)


def test_checkpoints_without_a_head_have_other_names():
    _, params, tensors = loaded("gpt2")
    short = {name.removeprefix("transformer."): a for name, a in tensors.items()}
    short["h.0.attn.bias"] = np.ones((1, 1, 64, 64), bool)  # a buffer of old files
    model, read = fnet.interop.from_huggingface(CONFIGS["gpt2"], short)
    chex.assert_trees_all_equal(read, params)
    assert sorted(fnet.interop.to_huggingface(model, read)) == sorted(
        short.keys() - {"h.0.attn.bias"}
    )


def test_a_tied_head_in_the_file_must_equal_the_embedding():
    _, params, tensors = loaded("gemma")
    table = tensors["model.embed_tokens.weight"]
    both = tensors | {"lm_head.weight": table}
    model, read = fnet.interop.from_huggingface(CONFIGS["gemma"], both)
    chex.assert_trees_all_equal(read, params)
    chex.assert_trees_all_equal(fnet.interop.to_huggingface(model, read), both)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        fnet.interop.from_huggingface(CONFIGS["gemma"], both | {"lm_head.weight": table + 1})


def test_the_factor_of_a_gemma4_block_is_not_trained():
    model, params, _ = loaded("gemma4_keys")
    gradient = jax.grad(lambda p: model.apply(p, {}, TOKENS, train=False)[0].sum())
    grads = jax.tree_util.tree_leaves_with_path(jax.jit(gradient)(params))
    factors = [g for path, g in grads if path[-1].key == "factor"]
    assert factors
    assert not any(map(np.any, factors))


def test_gemma4_ignores_keys_of_layers_that_read_those_of_others():
    _, params, tensors = loaded("gemma4_keys")
    unused = {f"model.layers.4.self_attn.{n}.weight": np.ones(1) for n in ("k_proj", "v_proj")}
    model, read = fnet.interop.from_huggingface(CONFIGS["gemma4_keys"], tensors | unused)
    chex.assert_trees_all_equal(read, params)
    assert len(model.kinds) == len(set(model.kinds))  # so that `fnet fit` compiles all blocks
    wrong = {"model.layers.2.self_attn.v_proj.weight": np.ones(1)}
    with pytest.raises(ValueError, match=r"attention_k_eq_v, but .* layers.2.self_attn.v_proj"):
        fnet.interop.from_huggingface(CONFIGS["gemma4_keys"], tensors | wrong)
    with pytest.raises(ValueError, match="use_double_wide_mlp True is not supported"):
        build_model(CONFIGS["gemma4_experts"] | {"use_double_wide_mlp": True})
    by_layer = {"1": {"head_dim": 16}, "2": {"head_dim": 8}}
    with pytest.raises(ValueError, match="per_layer_config must give all layers"):
        build_model(CONFIGS["gemma4_text"] | {"per_layer_config": by_layer})
    with pytest.raises(ValueError, match="share keys, some have the window 4, and no layer"):
        build_model(
            CONFIGS["gemma4_keys"]
            | {"layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 3}
        )


def test_a_share_of_rotated_features_is_refused_where_transformers_ignores_it():
    given = {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}
    with pytest.raises(ValueError, match=r"llama: partial_rotary_factor 0.5 is not supported"):
        build_model(CONFIGS["llama"] | given)
    with pytest.raises(ValueError, match=r"qwen3: partial_rotary_factor 0.5 is not supported"):
        build_model(CONFIGS["qwen3"] | {"partial_rotary_factor": 0.5})


@pytest.mark.slow
def test_experts_may_be_one_tensor():
    name = "qwen3_5_moe"
    _, _, tensors = loaded(name)
    one, pattern = {}, re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(\w+)_proj\.weight")
    experts = {}
    for key, a in tensors.items():
        if found := pattern.fullmatch(key):
            experts.setdefault(found[1], {})[found[3], int(found[2])] = a
        else:
            one[key] = a
    for prefix, parts in experts.items():
        gate, up, down = (
            np.stack([parts[part, i] for i in range(5)]) for part in ("gate", "up", "down")
        )
        one |= {
            f"{prefix}.gate_up_proj": np.concatenate([gate, up], 1),
            f"{prefix}.down_proj": down,
        }
    model, params = fnet.interop.from_huggingface(CONFIGS[name], one)
    logits, _ = jax.jit(lambda p: model.apply(p, {}, TOKENS, train=False))(params)
    np.testing.assert_allclose(logits[1, -1, :4], LOGITS[name], atol=2e-5)
    chex.assert_trees_all_equal(fnet.interop.to_huggingface(model, params), one)


class Slices:
    """A lazy tensor, which records how much is read of it at once."""

    def __init__(self, array, log):
        self.array, self.shape, self.dtype, self.log = array, array.shape, array.dtype, log

    def __getitem__(self, index):
        part = self.array[index]
        self.log.append(part.size / self.array.size)
        return part


def test_each_device_reads_only_its_slices():
    _, params, tensors = loaded("phi3")
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    log = []

    def sharding(path, shape):
        axis = next((i for i, n in enumerate(shape) if n % 4 == 0), None)
        spec = [None] * len(shape)
        if axis is not None:
            spec[axis] = "fsdp"
        return NamedSharding(mesh, PartitionSpec(*spec))

    lazy = {name: Slices(a, log) for name, a in tensors.items()}
    _, sharded = fnet.interop.from_huggingface(CONFIGS["phi3"], lazy, sharding=sharding)
    chex.assert_trees_all_equal(jax.device_get(sharded), jax.device_get(params))
    kernel = sharded["blocks"]["0"]["feed_forward"]["expand"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (8, 96)
    assert set(log) == {0.25}


def test_tensor_layouts_invert():
    a = np.arange(24.0).reshape(2, 1, 12)
    for t in (Tensor("a", "p", (12, 2), "b1a"), Tensor("a", "p", (2, 12), "a1b")):
        assert t.to_param(a).shape == t.shape
        assert t.file_shape == a.shape
        chex.assert_trees_all_equal(t.to_file(t.to_param(a)), a)
        index = (slice(1, 2), slice(0, 1))
        chex.assert_trees_all_equal(t.to_param(a[t.file_slices(index)]), t.to_param(a)[index])
    t = Tensor("a", "p", (24,), by_head=4)
    assert t.file_shape == (4, 6)
    chex.assert_trees_all_equal(t.to_file(t.to_param(np.eye(4, 6))), np.eye(4, 6))


# What published files contain, although it changes no logits.
EXTRAS = {
    "llama": {"is_llama_config": True, "rope_interleaved": False, "pretraining_tp": 1,
              "transformers.js_config": {"dtype": "q4"}},
    "gpt2": {"_num_labels": 1, "n_ctx": 1024, "summary_type": "cls_index",
             "task_specific_params": {"text-generation": {"max_length": 50}}},
    "phi3": {"full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False},
    # transformers 5 writes infinity as an object.
    "mamba2": {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
    "mamba": {"d_model": 32, "d_inner": 64, "fused_add_norm": True, "rms_norm": True,
              "pad_vocab_size_multiple": 8, "ssm_cfg": {}, "rescale_prenorm_residual": False},
}  # fmt: skip


@pytest.mark.parametrize("name", EXTRAS)
def test_accepts_what_published_files_contain(name):
    config = CONFIGS[name] | EXTRAS[name]
    if name == "mamba":
        config["n_layer"] = config["num_hidden_layers"]
        config["time_step_rank"] = 2  # a sixteenth of the width
    assert build_model(config).tensors == build_model(CONFIGS[name]).tensors


LLAMA = CONFIGS["llama"]
YARN = {"rope_type": "yarn", "factor": 4.0}
LONGROPE = CONFIGS["phi3_longrope"]


def test_rejects_options_by_name():
    for config, match in (
        ({"model_type": "bert"}, "model_type 'bert' is not supported, only .*llama"),
        ({}, "model_type None is not supported"),
        (LLAMA | {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClass"),
        (LLAMA | {"num_experts": 8}, "llama: unknown options in config.json: num_experts=8"),
        (LLAMA | {"hidden_act": "mish"}, "hidden_act 'mish' is not supported, only 'silu' or"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "dynamic"}},
            "rope_type 'dynamic' is not supported",
        ),
        (LLAMA | {"rope_scaling": {"rope_type": "linear"}}, "'linear' needs the option 'factor'"),
        (LLAMA | {"rope_scaling": YARN | {"gamma": 1}}, "unknown rope options {'gamma': 1}"),
        (
            LLAMA | {"rope_scaling": YARN, "max_position_embeddings": None},
            "no max_position_embeddings, which yarn needs",
        ),
        (LONGROPE | {"partial_rotary_factor": 0.5}, "short_factor must have 2 numbers, got 4"),
        (LONGROPE | {"sliding_window": 3}, "longrope with sliding_window 3"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2, "beta": 1}}, "unknown rope opt"),
        ({"model_type": "llama"}, "llama: config.json has no hidden_size"),
        (CONFIGS["mamba"] | {"hidden_act": "relu"}, "mamba: hidden_act 'relu' is not supported"),
        (CONFIGS["mamba"] | {"mixer_rms_eps": 1e-6}, "mamba: unknown options.*mixer_rms_eps"),
        (
            CONFIGS["mamba2"] | {"num_heads": 4},
            r"num_heads \* head_dim must be .* = 64, got 4 \* 8",
        ),
        (
            CONFIGS["recurrent_gemma"] | {"block_types": ["mamba"]},
            "block_types must name attention",
        ),
        (CONFIGS["recurrent_gemma"] | {"hidden_activation": "gelu"}, "must be gelu_pytorch_tanh"),
        (
            CONFIGS["lfm2"] | {"layer_types": ["conv"]},
            "must name full_attention or attention or conv",
        ),
        (
            CONFIGS["falcon_h1"] | {"mamba_rms_norm": True},
            "mamba_norm_before_gate True is not supp",
        ),
        (CONFIGS["falcon_h1"] | {"mamba_d_ssm": 60}, "must be the inner width 60, got 8 . 8"),
        (CONFIGS["falcon_h1"] | {"attention_bias": True}, "attention_bias True is not supported"),
        (
            CONFIGS["granitemoehybrid"] | {"position_embedding_type": "alibi"},
            "position_embedding_type 'alibi' is not supported",
        ),
        (CONFIGS["qwen3_5_text"] | {"attn_output_gate": False}, "attn_output_gate False is not"),
        (
            CONFIGS["qwen3_5_text"] | {"linear_num_value_heads": 4},
            "groups must divide heads, got groups=3, heads=4",
        ),
        (CONFIGS["qwen2"] | {"layer_types": ["linear_attention"] * 3}, "layer_types must name"),
        (CONFIGS["gpt2"] | {"scale_attn_weights": False}, "scale_attn_weights False"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "unknown options.*quantization_config"),
    ):
        with pytest.raises(ValueError, match=match):
            build_model(config)


def test_rejects_tensors_that_do_not_fit():
    _, _, tensors = loaded("llama")
    load = functools.partial(fnet.interop.from_huggingface, LLAMA)
    less = {n: a for n, a in tensors.items() if "layers.1.mlp" not in n}
    with pytest.raises(ValueError, match=r"lacks model.layers.1.mlp.down_proj.weight, .*up_proj"):
        load(less)
    with pytest.raises(ValueError, match=r"the model does not: model.layers.3.mlp.up_proj.weight"):
        load(tensors | {"model.layers.3.mlp.up_proj.weight": np.zeros((2, 2))})
    wrong = {"model.norm.weight": np.zeros(31, np.float32)}
    with pytest.raises(ValueError, match=r"model.norm.weight: expected shape \(32,\) .* got \(31,"):
        load(tensors | wrong)
    with pytest.raises(TypeError, match=r"model.norm.weight: expected a floating dtype, got int8"):
        load(tensors | {"model.norm.weight": np.zeros(32, np.int8)})


@pytest.mark.slow
def test_longrope_takes_the_length_of_the_sequence_or_of_the_cache():
    model, params, _ = loaded("phi3_longrope")
    for length in (4, 17):
        tokens = TOKENS[:, :length]
        logits, _ = jax.jit(lambda p, tokens=tokens: model.apply(p, {}, tokens, train=False))(
            params
        )
        cache = model.decode.init_cache(2, length)
        _, cache = model.decode.extend(params, {}, cache, tokens[:, :-1], jnp.int32(0))
        last, _ = model.decode.extend(params, {}, cache, tokens[:, -1:], jnp.int32(length - 1))
        chex.assert_trees_all_close(last, logits[:, -1], atol=2e-5)
