"""Sections of image networks: what each field changes, and what they refuse."""

import dataclasses

import pytest

import fnet
from train.config.registry import variants
from train.networks import images

OTHER = {
    "activation": "silu", "activation_param": 0.2, "norm": "group", "depth": 50, "stem": "3x3",
    "dilation": (1, 1, 2, 4), "dilate_first": False, "shortcut": "pool", "groups": 2,
    "group_width": 32, "widths": (4, 8, 16), "blocks_per_stage": 3, "stem_width": 5,
    "first_stride": 2, "a2": True, "dilated": True, "growth": 7, "stem_norm": True,
    "blocks": (2, 2), "bottleneck": True, "small_images": False, "stochastic_depth": 0.3,
    "dropout": 0.4, "eps": 0.25, "patch": 3, "response_norm": True, "layer_scale": 0.5,
    "hidden": 17, "heads": 4, "registers": 2, "pooling": "mean", "width": 32,
}  # fmt: skip
VARIANTS = {"efficientnet": "mobilenet_v3_small", "regnet": "regnetx_002", "swin": "swin_s"}
SECTIONS = {
    name: kind
    for name, kind in variants("model").items()
    if kind.__module__ == "train.networks.images" and name != "deeplab"
}


def built(section, monkeypatch):
    """The name and the options that `fnet.models.get` is asked for."""
    asked = {}
    with monkeypatch.context() as patch:
        patch.setattr(fnet.models, "get", lambda name, **given: asked.update(given, name=name))
        section.build((20, 24, 2), 7)
    return asked


@pytest.mark.parametrize("name", SECTIONS)
def test_each_field_changes_one_option_of_the_network(name, monkeypatch):
    section = SECTIONS[name]()
    plain = built(section, monkeypatch)
    assert plain["num_classes"] == 7
    shapes = {"in_channels": 2, "image_shape": (20, 24, 2), "in_shape": (20, 24, 2)}
    assert any(plain.get(option) == shape for option, shape in shapes.items())
    own = {f.name for f in dataclasses.fields(section)} & (OTHER.keys() | {"variant"})
    assert own
    for field in own:
        value = VARIANTS[name] if field == "variant" else OTHER[field]
        if field == "depth" and section.depth == value:
            value = {"wider_resnet": 16, "densenet": 169}.get(name, 101)
        changed = built(dataclasses.replace(section, **{field: value}), monkeypatch)
        differ = {
            option
            for option in changed.keys() | plain.keys()
            if changed.get(option) != plain.get(option)
        }
        assert changed["name" if field == "variant" else field] == value
        assert differ - {"eps"} == {"name" if field == "variant" else field} - {"eps"}


@pytest.mark.parametrize(
    ("options", "eps", "padding"),
    [
        ({"variant": "efficientnet_b0"}, 1e-5, "half"),
        ({"variant": "efficientnet_b5"}, 1e-3, "half"),
        ({"variant": "tf_efficientnet_b0"}, 1e-3, "same"),
        ({"variant": "tf_efficientnet_b0", "eps": 0.1}, 0.1, "same"),
        ({"variant": "efficientnet_b5", "norm": "group"}, 1e-5, "half"),
        ({"variant": "efficientnet_b5", "norm": "abn"}, 1e-3, "half"),
    ],
)
def test_the_epsilon_is_the_publishers_unless_one_is_given(options, eps, padding, monkeypatch):
    asked = built(images.EfficientNet(**options), monkeypatch)
    assert (asked["eps"], asked["padding"]) == (eps, padding)


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {"dilation": (1, 1, 2, 4)}),
        ({"stem": "3x3"}, {"dilation": (1, 1, 2, 4), "stem": "3x3"}),
        ({"dilate_first": False}, {"dilation": (1, 1, 2, 4), "dilate_first": False}),
        ({"backbone": "wider_resnet16_a2"}, {"dilated": True}),
        ({"backbone": "densenet121"}, {"dilation": (1, 1, 2, 4)}),
        ({"backbone": "densenet121", "head": "concat"}, {"dilation": (1, 1, 2, 4), "stem_norm": True}),
        ({"backbone": "resnet18", "head": "concat"}, {"dilation": (1, 1, 2, 4)}),
    ],
)  # fmt: skip
def test_the_backbone_of_deeplab_keeps_an_eighth_of_the_resolution(options, asked, monkeypatch):
    class AskedError(Exception):
        pass

    def get(name, **given):
        raise AskedError(name, given)

    monkeypatch.setattr(fnet.models, "get", get)
    with pytest.raises(AskedError) as error:
        images.DeepLab(**options).build((64, 64, 5), 3)
    name, given = error.value.args
    assert name == options.get("backbone", "resnet50")
    common = {"activation": "leaky_relu", "activation_param": None, "norm": "abn"}
    assert given == {"num_classes": None, "in_channels": 5} | common | asked


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": "resnet50d", "stem": "3x3"}, "stem: resnet50d has its own stem"),
        (
            {"backbone": "wider_resnet16_a2", "stem": "3x3"},
            "has its own stem; leave model.stem out",
        ),
        ({"backbone": "densenet121", "dilate_first": False}, "only ResNets can leave it out"),
    ],
)
def test_a_backbone_refuses_options_of_others(options, message):
    with pytest.raises(ValueError, match=message):
        images.DeepLab(**options).build((64, 64, 3), 3)
