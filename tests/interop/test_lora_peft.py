"""Adapter files of PEFT: equal outputs and gradients, both ways, and options that are refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pretrained_cases import CONFIGS, TOKENS, peer

from fnet import lora
from fnet.interop import from_huggingface, to_huggingface
from fnet.interop.huggingface import build_model
from fnet.interop.peft import from_peft, huggingface_modules, to_peft
from fnet.quantization import find_targets
from train.networks.pretrained import Pretrained
from train.networks.published.network import adapters_of

MODULES = {
    "0": ("first/kernel", False),
    "2": ("second/weight", True),
    "stack.0": ("stack/kernel", False, 0),
    "stack.1": ("stack/kernel", False, 1),
}


def tensors_of(dora=False, rank=2):
    random = np.random.default_rng(0)
    sizes = {"0": (6, 5), "2": (5, 3), "stack.0": (3, 3), "stack.1": (3, 3)}
    tensors = {}
    for module, (n_in, n_out) in sizes.items():
        name = f"base_model.model.{module}"
        tensors[f"{name}.lora_A.weight"] = random.normal(size=(rank, n_in)).astype(np.float32)
        tensors[f"{name}.lora_B.weight"] = random.normal(size=(n_out, rank)).astype(np.float32)
        if dora:
            tensors[f"{name}.lora_magnitude_vector"] = random.normal(size=n_out).astype(np.float32)
    return tensors


def config_of(**options):
    return {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none"} | options


@pytest.mark.parametrize("dora", [False, True])
def test_round_trip_is_exact(dora):
    tensors = tensors_of(dora)
    config, adapters = from_peft(config_of(use_dora=dora, use_rslora=True), tensors, MODULES)
    assert config.scale == pytest.approx(4 / 2**0.5)
    assert config.targets == {"first/kernel": "io", "second/weight": "oi", "stack/kernel": "nio"}
    assert adapters["stack/kernel"]["a"].shape == (2, 3, 2)
    again, restored = to_peft(config, adapters, MODULES, "base")
    assert restored.keys() == tensors.keys()
    for name, array in tensors.items():
        np.testing.assert_array_equal(restored[name], array)
    assert again["target_modules"] == list(MODULES)
    assert again["base_model_name_or_path"] == "base"
    assert from_peft(again, restored, MODULES)[0] == config


def test_updates_are_the_products_of_the_tensors():
    tensors = tensors_of()
    config, adapters = from_peft(config_of(), tensors, MODULES)
    params = {
        "first": {"kernel": jnp.zeros((6, 5))},
        "second": {"weight": jnp.zeros((3, 5))},
        "stack": {"kernel": jnp.zeros((2, 3, 3))},
    }
    merged = lora.merge(config, params, adapters)

    def product(module):
        name = f"base_model.model.{module}"
        return 2 * tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"]

    np.testing.assert_allclose(merged["first"]["kernel"], product("0").T, rtol=1e-5)
    np.testing.assert_allclose(merged["second"]["weight"], product("2"), rtol=1e-5)
    np.testing.assert_allclose(merged["stack"]["kernel"][1], product("stack.1").T, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "has_output"),
    [
        *(("mamba", False), ("mamba2", False), ("falcon_h1", False), ("bamba", True)),
        *(("lfm2", True), ("qwen3_5", True), ("recurrent_gemma", False)),
    ],
)
def test_default_adapters_are_those_of_peft(name, has_output, tmp_path):
    """PEFT has none for a convolution, nor for an output whose weight a fused kernel reads."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    model, section = build_model(CONFIGS[name]), Pretrained(path=str(tmp_path), lora_rank=2)
    params, _ = jax.eval_shape(model.init, jax.random.key(0))
    targets = find_targets("test", params, adapters_of(section).targets)
    modules = huggingface_modules(model)
    assert {m.path for m in modules.values() if m.path.startswith("blocks/")} == targets.keys()
    assert not any("/conv/" in path for path in targets)
    assert any("/conv/" in t.path for t in model.tensors)
    assert any(name.endswith(".out_proj") for name in modules) == has_output


def test_each_expert_has_a_module_and_routers_have_no_adapters():
    model = build_model(CONFIGS["mixtral"])
    params, _ = jax.jit(model.init)(jax.random.key(0))
    config = lora.LoRA(2, targets=Pretrained().lora_targets)
    adapters = lora.init(config, params, jax.random.key(1))
    assert not any("router" in path for path in adapters)
    modules = huggingface_modules(model)
    peft_config, tensors = to_peft(config, adapters, modules)
    a, b = adapters["blocks/1/feed_forward/experts/up/kernel"].values()
    name = "base_model.model.model.layers.1.block_sparse_moe.experts.3.w3"
    np.testing.assert_array_equal(tensors[f"{name}.lora_A.weight"], a[3].T)
    np.testing.assert_array_equal(tensors[f"{name}.lora_B.weight"], b[3].T)
    again = from_peft(peft_config, tensors, modules)[1]
    assert again.keys() == adapters.keys()
    for path in adapters:
        np.testing.assert_array_equal(again[path]["a"], adapters[path]["a"])


def test_experts_in_one_tensor_and_their_routers_have_no_module():
    modules = huggingface_modules(build_model(CONFIGS["gpt_oss"]))
    assert {name.split(".")[-1] for name in modules} == {"lm_head", *map("{}_proj".format, "qkvo")}


@pytest.mark.parametrize("dora", [False, True])
def test_outputs_that_a_file_has_in_another_order_keep_their_adapters(dora):
    """Query, key and value of each head follow each other in GPT-NeoX."""
    model = build_model(CONFIGS["gpt_neox"])
    params, _ = model.init(jax.random.key(0))
    module = "gpt_neox.layers.1.attention.query_key_value"
    random = np.random.default_rng(0)
    tensors = {
        f"base_model.model.{module}.lora_A.weight": random.normal(size=(2, 32)),
        f"base_model.model.{module}.lora_B.weight": random.normal(size=(96, 2)),
    }
    if dora:
        tensors[f"base_model.model.{module}.lora_magnitude_vector"] = random.normal(size=96)
    tensors = {name: a.astype(np.float32) for name, a in tensors.items()}
    modules = huggingface_modules(model)
    config, adapters = from_peft(config_of(use_dora=dora), tensors, modules)
    again = to_peft(config, adapters, modules)[1]
    for name, array in tensors.items():
        np.testing.assert_array_equal(again[name], array)
    before, after = (
        to_huggingface(model, p)[f"{module}.weight"]
        for p in (params, lora.merge(config, params, adapters))
    )
    a, b, *magnitude = tensors.values()
    expected = before + 2 * b @ a
    if dora:
        norms = np.linalg.norm(expected, axis=1, keepdims=True)
        expected *= magnitude[0][:, None] / norms
    np.testing.assert_allclose(after, expected, atol=1e-5)


def test_rejects_options():
    for options, message in (
        ({"peft_type": "LOHA"}, "peft_type must be 'LORA', got 'LOHA'"),
        ({"bias": "all"}, "not supported: bias='all'; merge the adapter with PEFT"),
        ({"modules_to_save": ["head"]}, r"not supported: modules_to_save=\['head'\]"),
        ({"rank_pattern": {"0": 4}}, r"not supported: rank_pattern=\{'0': 4\}"),
        ({"init_lora_weights": "pissa"}, "not supported: init_lora_weights='pissa'"),
        ({"use_something_new": True}, "not supported: use_something_new=True"),
        ({"r": 3}, r"module '0' must have the rank r=3, got \(2, 2\)"),
        ({"use_dora": True}, r"module '0' must have the parts \['a', 'b', 'magnitude'\], got"),
    ):
        with pytest.raises(ValueError, match=message):
            from_peft(config_of(**options), tensors_of(), MODULES)


def test_rejects_a_configuration_without_a_rank():
    with pytest.raises(ValueError, match="the rank r is missing"):
        from_peft({"peft_type": "LORA"}, tensors_of(), MODULES)


def test_accepts_a_full_configuration_of_defaults():
    defaults = {"loftq_config": {}, "layer_replication": None, "inference_mode": True}
    defaults |= {"init_lora_weights": True, "lora_dropout": 0.1, "target_modules": ["0"]}
    from_peft(config_of(**defaults), tensors_of(), MODULES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_model.model.9.lora_A.weight", "belongs to the module '9', which modules does not"),
        ("base_model.model.0.lora_embedding_A", "expected tensors base_model.model.MODULE with"),
    ],
)
def test_rejects_unknown_tensors(name, message):
    with pytest.raises(ValueError, match=message):
        from_peft(config_of(), {name: np.zeros((2, 2))}, MODULES)


def test_rejects_missing_tensors_and_layers():
    with pytest.raises(ValueError, match="expected the tensors of an adapter, got none"):
        from_peft(config_of(), {}, MODULES)
    tensors = {name: a for name, a in tensors_of().items() if "stack.0" not in name}
    with pytest.raises(ValueError, match=r"layer of 'stack/kernel' must have .* got layers \[1\]"):
        from_peft(config_of(), tensors, MODULES)
    twice = MODULES | {"2": ("first/kernel", True)}
    with pytest.raises(ValueError, match="two modules are at 'first/kernel', one is '2'"):
        from_peft(config_of(), tensors_of(), twice)
    config, adapters = from_peft(config_of(), tensors_of(), MODULES)
    fewer = {k: v for k, v in MODULES.items() if k != "0"}
    with pytest.raises(ValueError, match=r"lacks \['first/kernel'\]"):
        to_peft(config, adapters, fewer)
    adapters["first/kernel"]["b"] *= 0
    with pytest.warns(UserWarning, match=r"lacks \['first/kernel'\], which change nothing yet"):
        assert to_peft(config, adapters, fewer)[0]["target_modules"] == [*fewer]


@pytest.mark.parametrize(
    "form", [{}, {"use_rslora": True}, {"use_dora": True}], ids=["lora", "rslora", "dora"]
)
def test_outputs_and_gradients_equal_those_of_peft(form, tmp_path):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    load_file = pytest.importorskip("safetensors.numpy").load_file
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    params = {
        "first": {"kernel": base[0].weight.detach().numpy().T, "bias": base[0].bias},
        "second": {"weight": base[2].weight.detach().numpy(), "bias": base[2].bias},
    }
    params = jax.tree.map(lambda a: jnp.array(a.tolist()), params)
    options = {"r": 2, "lora_alpha": 3, "target_modules": ["0", "2"], **form}
    model = peft.get_peft_model(base, peft.LoraConfig(**options))
    for name, tensor in model.named_parameters():
        if "lora_" in name:
            tensor.data += 0.3 * torch.randn(tensor.shape)
    model.save_pretrained(tmp_path)
    x = torch.randn(4, 6)
    y = model(x)
    (y**2).sum().backward()

    adapter_config = json.loads((tmp_path / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    config, adapters = from_peft(adapter_config, tensors, MODULES)

    def apply(params, x):
        first, second = params["first"], params["second"]
        x = jnp.tanh(x @ first["kernel"] + first["bias"][None])
        return x @ second["weight"].T + second["bias"][None]

    def loss(adapters):
        y = lora.wrap(apply, config)(adapters, params, jnp.array(x.tolist()))
        return (y**2).sum(), y

    grads, result = jax.grad(loss, has_aux=True)(adapters)
    np.testing.assert_allclose(result, y.detach(), rtol=1e-5, atol=1e-5)
    _, by_name = to_peft(config, grads, MODULES)
    expected = {
        name.replace(".default", "").removesuffix(".weight"): tensor.grad
        for name, tensor in model.named_parameters()
        if tensor.grad is not None
    }
    assert len(expected) == len(by_name) == (6 if config.dora else 4)
    for name, gradient in by_name.items():
        reference = expected[name.removesuffix(".weight")]
        np.testing.assert_allclose(gradient, reference, rtol=1e-5, atol=1e-5)
    merged = lora.merge(config, params, adapters)
    np.testing.assert_allclose(
        merged["first"]["kernel"].T, model.merge_and_unload()[0].weight.detach(), atol=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_of_every_family_equal_those_of_peft(name, tmp_path):
    """All linear modules but the head; with experts, which transformers stacks, attention alone."""
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    pytest.importorskip("transformers")
    load_file = pytest.importorskip("safetensors.numpy").load_file
    base, base_config, weights = peer(name)
    model, params = from_huggingface(base_config, weights)
    modules = huggingface_modules(model)
    linear = {n for n, m in base.named_modules() if isinstance(m, torch.nn.Linear)}
    linear |= {n for n, m in base.named_modules() if type(m).__name__ == "Conv1D"}
    targets = [n for n in modules if n in linear and n != "lm_head"]
    if any(".experts." in tensor.path.replace("/", ".") for tensor in model.tensors):
        targets = [n for n in targets if "self_attn" in n]  # PEFT turns the names of gates
    assert targets
    torch.manual_seed(0)
    options = {"r": 2, "lora_alpha": 8, "target_modules": targets}
    adapted = peft.get_peft_model(base, peft.LoraConfig(**options))
    for parameter, tensor in adapted.named_parameters():
        if "lora_" in parameter:
            tensor.data += 0.1 * torch.randn(tensor.shape)
    adapted.save_pretrained(tmp_path)
    adapter_config = json.loads((tmp_path / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    config, adapters = from_peft(adapter_config, tensors, modules)
    again = to_peft(config, adapters, modules)[1]
    assert again.keys() == tensors.keys()
    for tensor, array in tensors.items():
        np.testing.assert_array_equal(again[tensor], array)
    apply = jax.jit(lambda a, p: lora.wrap(model.apply, config)(a, p, {}, TOKENS, train=False)[0])
    with torch.no_grad():
        expected = adapted(torch.tensor(np.asarray(TOKENS))).logits.numpy()
    assert np.abs(apply(adapters, params) - expected).max() <= 1e-5 * np.abs(expected).max()
