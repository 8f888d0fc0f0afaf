"""Published image networks give the outputs and the tensors of transformers and timm."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pretrained_image_cases as cases
import pytest
from pretrained_cases import file_shapes, weights

import fnet
from fnet.interop.huggingface import FAMILIES, build_model

TOWERS = {
    "clip": ["logit_scale", "text_model.final_layer_norm.weight", "text_projection.weight"],
    "siglip": ["logit_bias", "logit_scale", "text_model.head.weight"],
}
WITHOUT_PREFIX = {
    "ViTModel",
    "Dinov2Model",
    "Dinov2WithRegistersModel",
    "CLIPVisionModel",
    "SiglipVisionModel",
    "ConvNextModel",
}


@functools.cache
def tensors_of(name):
    """Draw the tensors of a file. In files of networks without a head, names have no prefix."""
    shapes = file_shapes(build_model(cases.CONFIGS[name]))
    if cases.CONFIGS[name].get("architectures", [""])[0] in WITHOUT_PREFIX:
        prefix = FAMILIES[cases.CONFIGS[name]["model_type"]].prefix
        shapes = {n.removeprefix(prefix): shape for n, shape in shapes.items()}
    return weights(shapes)


def evaluate(model, params, x):
    return jax.jit(lambda p: model.apply(p, {}, x, train=False)[0])(params)


# Together with the tests of parts, they run all lines of image networks.
QUICK = {
    *("dinov2_giant", "siglip_vision_model", "timm_clip", "timm_convnextv2_atto"),
    *("timm_convnext_tiny", "timm_deit_distilled", "timm_mean"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in cases.CONFIGS]
)
def test_outputs_match_those_of_the_peer(name):
    tensors = tensors_of(name)
    model, params = fnet.interop.from_huggingface(cases.CONFIGS[name], tensors)
    y = evaluate(model, params, cases.images(cases.image_size(cases.CONFIGS[name])))
    np.testing.assert_allclose(y[1, :4], cases.OUTPUTS[name], atol=2e-5)
    chex.assert_trees_all_equal(fnet.interop.to_huggingface(model, params), tensors)


@pytest.mark.sweep(9)
@pytest.mark.parametrize("name", cases.OTHER_SIZES)
def test_interpolated_positions_match_those_of_the_peer(name):
    load = functools.partial(fnet.interop.from_huggingface, cases.CONFIGS[name], tensors_of(name))
    model, params = load(interpolate_positions=True)
    np.testing.assert_allclose(
        evaluate(model, params, cases.images((24, 20)))[1, :4], cases.OTHER_SIZES[name], atol=2e-5
    )
    model, params = load()
    with pytest.raises(ValueError, match=r"learned for images of 16 x 16, got 24 x 20; resize"):
        evaluate(model, params, cases.images((24, 20)))


def test_masked_patches_match_those_of_transformers():
    model, params = fnet.interop.from_huggingface(cases.CONFIGS["dinov2"], tensors_of("dinov2"))
    x, masked = cases.images((16, 16)), cases.masked_patches()
    y = jax.jit(lambda p: model.apply(p, {}, x, train=False, masked=masked)[0])(params)
    np.testing.assert_allclose(y[1, :4], cases.MASKED, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", cases.CONFIGS)
def test_all_outputs_match_those_of_the_peer(name):
    pytest.importorskip("torch")
    pytest.importorskip("timm" if name.startswith("timm") else "transformers")
    theirs, config, tensors = cases.peer(name)
    x = cases.images(cases.image_size(cases.CONFIGS[name]))
    expected = cases.outputs(theirs, x)
    model, params = fnet.interop.from_huggingface(config, tensors)
    assert np.abs(evaluate(model, params, x) - expected).max() <= 1e-5 * np.abs(expected).max()
    written = fnet.interop.to_huggingface(model, params)
    of_images = {n: a for n, a in tensors.items() if not n.startswith(("text_", "logit_"))}
    chex.assert_trees_all_equal(written, of_images)


@pytest.mark.parametrize("name", ["clip", "siglip"])
def test_an_image_tower_ignores_the_text_tower(name):
    text = {n: np.ones((), np.float32) for n in TOWERS[name]}
    model, params = fnet.interop.from_huggingface(cases.CONFIGS[name], tensors_of(name) | text)
    chex.assert_trees_all_equal(fnet.interop.to_huggingface(model, params), tensors_of(name))
    with pytest.raises(ValueError, match=r"the model does not: audio_model.weight"):
        fnet.interop.from_huggingface(
            cases.CONFIGS[name], tensors_of(name) | {"audio_model.weight": np.ones(1, np.float32)}
        )


def test_tensors_decide_whether_there_is_a_head():
    _, full = fnet.interop.from_huggingface(cases.CONFIGS["vit"], tensors_of("vit"))
    body = {n.removeprefix("vit."): a for n, a in tensors_of("vit").items() if n.startswith("vit.")}
    for architecture in ("ViTModel", "ViTForImageClassification"):
        config = cases.CONFIGS["vit"] | {"architectures": [architecture]}
        model, params = fnet.interop.from_huggingface(config, body)
        chex.assert_trees_all_equal(params, {n: a for n, a in full.items() if n != "head"})
        assert evaluate(model, params, cases.images((16, 16))).shape == (2, 32)
        chex.assert_trees_all_equal(fnet.interop.to_huggingface(model, params), body)


def test_bfloat16_tensors_give_bfloat16_outputs():
    tensors = {n: a.astype(jnp.bfloat16) for n, a in tensors_of("dinov2").items()}
    model, params = fnet.interop.from_huggingface(cases.CONFIGS["dinov2"], tensors)
    y = evaluate(model, params, cases.images((16, 16)))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y[1, :4].astype(np.float32), cases.OUTPUTS["dinov2"], atol=0.1)
    with pytest.raises(TypeError, match=r"images: x must be floating, got uint8"):
        evaluate(model, params, np.zeros((1, 16, 16, 3), np.uint8))


def test_rejects_options_by_name():
    for config, match in (
        (cases.CONFIGS["vit"] | {"architectures": ["ViTForMaskedImageModeling"]}, "ViTForMasked"),
        (cases.CONFIGS["vit"] | {"hidden_act": "mish"}, "hidden_act 'mish' is not supported"),
        (cases.CONFIGS["dinov2"] | {"use_rope": True}, "dinov2: unknown options.*use_rope=True"),
        (
            cases.CONFIGS["clip"] | {"vision_config": cases.CONFIGS["vit"] | {"num_experts": 2}},
            "clip: unknown options in config.json: num_experts=2",
        ),
        ({"architecture": "resnet50"}, "timm: architecture 'resnet50' is not supported"),
        ({"architecture": "vit_medium_patch16_gap_240"}, "'vit_medium_patch16_gap_240' is not"),
        (
            cases.CONFIGS["timm_vit"] | {"model_args": {"qk_norm": True}},
            "vit_base_patch16_224: qk_norm True is not supported, only False",
        ),
        (
            cases.CONFIGS["timm_vit"] | {"model_args": {"block_fn": "ParallelScalingBlock"}},
            "vit_base_patch16_224: unknown options in config.json: block_fn=",
        ),
        (
            {"architecture": "convnext_tiny_hnf"},
            "architecture 'convnext_tiny_hnf' is not supported",
        ),
        (
            cases.CONFIGS["timm_convnext_tiny"] | {"model_args": {"patch_size": 2}},
            "convnext_tiny: patch_size 2 is not supported, only 4",
        ),
        (cases.CONFIGS["timm_vit"] | {"license": "mit"}, "unknown options in config.json: license"),
    ):
        with pytest.raises(ValueError, match=match):
            build_model(config)


def test_only_image_networks_interpolate_positions():
    config = {"model_type": "gpt2", "vocab_size": 11, "n_embd": 8, "n_layer": 1, "n_head": 2}
    with pytest.raises(ValueError, match=r"gpt2: has no positions of image patches"):
        build_model(config, interpolate_positions=True)
    with pytest.raises(ValueError, match=r"convnext: has no positions of image patches"):
        build_model(cases.CONFIGS["convnext"], interpolate_positions=True)


def timm(architecture, size=224):
    other = {"num_classes": 0, "pretrained_cfg": {"input_size": [3, size, size]}}
    return {"architecture": architecture} | (other if size != 224 else {})


def transformers(kind, architecture):
    return {"model_type": kind, "architectures": [architecture]}


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (timm("vit_base_patch16_224"), 86_567_656),
        (timm("vit_tiny_patch16_224"), 5_717_416),
        (timm("deit_base_distilled_patch16_224"), 87_338_192),
        (timm("vit_giant_patch14_reg4_dinov2", 518), 1_136_483_840),
        (timm("vit_so400m_patch14_siglip_384", 384), 428_225_600),
        (timm("convnext_xxlarge", 256), 843_398_016),
        (transformers("vit", "ViTForImageClassification"), 85_800_194),
        (  # published for images of 518 pixels
            transformers("dinov2", "Dinov2ForImageClassification"),
            86_580_480 - (37**2 - 16**2) * 768 + 2 * 1537,
        ),
        (transformers("clip_vision_model", "CLIPVisionModelWithProjection"), 87_849_216),
        (transformers("siglip_vision_model", "SiglipVisionModel"), 92_884_224),
    ],
)
def test_parameter_counts_are_those_of_timm_and_transformers(config, parameters):
    params, _ = jax.eval_shape(build_model(config).init, jax.random.key(0))
    assert sum(a.size for a in jax.tree.leaves(params)) == parameters


@pytest.mark.parametrize(
    ("architecture", "initial"),
    [("deit3_base_patch16_224", 1e-6), ("vit_base_patch14_dinov2", 1e-5)],
)
def test_layer_scales_begin_as_in_timm(architecture, initial):
    config = cases.CONFIGS["timm_vit"] | {"architecture": architecture}
    params, _ = build_model(config).init(jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    scales = [a for path, a in leaves if "post_norm" in jax.tree_util.keystr(path)]
    assert scales
    chex.assert_trees_all_equal(scales, [jnp.full_like(a, initial) for a in scales])
