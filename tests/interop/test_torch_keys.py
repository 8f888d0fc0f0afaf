"""State-dict keys and shapes against mapillary/inplace_abn and torchvision."""

import re
import zlib

import pytest
from torch_cases import keys_and_shapes, torch_shapes

from fnet import models
from fnet.interop import families
from fnet.interop.families import recognize

# Number of arrays and crc32 of the sorted lines "key shape" of the state dicts of the models in
# mapillary/inplace_abn 1.1, scripts/models, 1000 classes ("3x3": input_3x3=True).
REFERENCE = {
    "resnet18": (102, 0xA5CD3E97),
    "resnet34": (182, 0x2D39EB1A),
    "resnet50": (267, 0xDDB1E023),
    "resnet101": (522, 0x4964DFAF),
    "resnet152": (777, 0x8E974A05),
    "resnext50": (251, 0xA843DD0F),
    "resnext101": (506, 0x06E73229),
    "resnext101 3x3": (516, 0x3BDE591F),
    "resnext152": (761, 0xAB71AB86),
    "densenet121": (602, 0x5624D8B2),
    "densenet169": (842, 0x78C51768),
    "densenet201": (1002, 0x27D23ABF),
    "densenet264": (1322, 0x5485DB26),
    "wider_resnet16": (83, 0x6192C9D5),
    "wider_resnet16_a2": (83, 0x6192C9D5),
    "wider_resnet20": (103, 0xB87DA4DB),
    "wider_resnet20_a2": (103, 0xB87DA4DB),
    "wider_resnet38": (193, 0x75556ADD),
    "wider_resnet38_a2": (193, 0x75556ADD),
}

# The same for torchvision 0.28 and, where it lacks a network, timm 1.0.31.
TORCHVISION = {
    "resnet18": (102, 0x34D030BD),
    "resnet34": (182, 0x888943B5),
    "resnet50": (267, 0x6AA4621C),
    "resnet101": (522, 0xCE4979FC),
    "resnet152": (777, 0xADD45A78),
    "resnext50_32x4d": (267, 0x9C9E7A1E),
    "resnext101_32x8d": (522, 0xE183DF83),
    "resnext101_64x4d": (522, 0x54869EA7),
    "wide_resnet50_2": (267, 0xA6ED3C41),
    "wide_resnet101_2": (522, 0x42334F1B),
    "densenet121": (606, 0xE563B6E9),
    "densenet161": (806, 0x5D46CE8D),
    "densenet169": (846, 0xE1F25096),
    "densenet201": (1006, 0x04C000D6),
    "resnet10t": (72, 0xB2A5C045),
    "resnet18d": (112, 0xF0288DF2),
    "resnet26t": (157, 0x84AA252E),
    "resnet50c": (277, 0x74D81D66),
    "resnet50d": (277, 0x5644F008),
    "resnet50s": (277, 0xAC6263CF),
    "resnext50d_32x4d": (277, 0x9F7C8016),
    "resnext101_32x4d": (522, 0x93C7D3B2),
    "resnet200d": (1027, 0xE91A3597),
}

# The same for the snapshot that scripts/test_vistas_single_gpu.py loads.
VISTAS = (212, 0x04DF3295)


DEEP = re.compile("densenet(169|2)|resnet(101|152|200d)|resnext1|wide_resnet101")


def quick(names):
    """The names, of which deep networks are slow to trace."""
    return [pytest.param(n, marks=[pytest.mark.slow] if DEEP.search(n) else []) for n in names]


def digest(shape_of):
    lines = sorted(f"{key} {shape}" for key, shape in shape_of.items())
    return len(lines), zlib.crc32("\n".join(lines).encode())


@pytest.mark.parametrize("name", quick(REFERENCE))
def test_keys_and_shapes_match_the_reference(name):
    options = {"stem": "3x3"} if name.endswith("3x3") else {}
    assert digest(keys_and_shapes(name.split()[0], **options)) == REFERENCE[name]


@pytest.mark.parametrize("name", quick(TORCHVISION))
def test_keys_and_shapes_match_torchvision_and_timm(name):
    options = {"stem_norm": True} if name.startswith("densenet") else {}
    shapes = keys_and_shapes(name, "torchvision", **options)
    assert digest(shapes) == TORCHVISION[name]
    found = recognize({f"model.{key}": shape for key, shape in shapes.items()})
    assert (found.variant, found.classes, found.norm) == (name, 1000, "batch")
    in_torchvision = name.startswith("densenet") or name in families._IN_TORCHVISION
    assert found.title == f"{'torchvision' if in_torchvision else 'timm'}'s {name}"


def test_keys_and_shapes_of_deeplab_match_torchvision():
    body = models.get("resnet50", num_classes=None, dilation=(1, 1, 2, 4))
    network = models.deeplab(body, 2048, num_classes=21, head="concat")
    shapes = torch_shapes(network, "torchvision")
    assert digest(shapes) == (302, 0x2D24B635)
    found = recognize(shapes)
    assert found.title == "torchvision's DeepLabV3 on resnet50"
    assert found.options == {"backbone": "resnet50", "head": "concat", "dilate_first": False}


def test_old_names_of_published_densenets_are_read():
    old = "features.denseblock1.denselayer2.norm.2.running_mean"
    assert families.current_key(old) == "features.denseblock1.denselayer2.norm2.running_mean"
    assert families.current_key("features.norm0.weight") == "features.norm0.weight"


def test_keys_and_shapes_of_deeplab_match_the_vistas_snapshot():
    body = models.get("wider_resnet38_a2", num_classes=None, dilated=True)
    assert digest(torch_shapes(models.deeplab(body, 4096, num_classes=65), "reference")) == VISTAS


@pytest.mark.parametrize("name", quick(REFERENCE))
def test_recognizes_networks_by_their_keys(name):
    options = {"stem": "3x3"} if name.endswith("3x3") else {}
    shapes = keys_and_shapes(name.split()[0], **options)
    variant = name.split()[0].removesuffix("_a2")
    found = recognize(shapes)
    assert (found.title, found.variant) == (f"mapillary/inplace_abn's {variant}", variant)
    assert found.classes == 1000
    assert found.options.get("stem") == (None if "wider" in name else options.get("stem", "7x7"))
    head = {"head.map_convs.0.weight": (256, 2048, 1, 1), "cls.weight": (65, 256, 1, 1)}
    segmentation = recognize({f"body.{key}": shape for key, shape in shapes.items()} | head)
    assert segmentation.title == f"mapillary/inplace_abn's DeepLabV3 on {variant}"
    assert (segmentation.model, segmentation.classes) == ("deeplab", 65)
    fewer = {key: shape for key, shape in shapes.items() if "mod3" not in key}
    assert getattr(recognize(fewer), "model", None) is None
