"""State-dict keys and shapes against mapillary/inplace_abn and torchvision."""

import json
import re
import zlib
from pathlib import Path

import pytest
from torch_cases import keys_and_shapes, torch_shapes

from fnet import models
from fnet.interop import families
from fnet.interop.families import recognize

# Number of arrays and crc32 of the sorted lines "key shape" of the state dicts of the models in
# mapillary/inplace_abn 1.1, scripts/models, 1000 classes ("3x3": input_3x3=True).
RECORDED = json.loads(Path(__file__).with_suffix(".json").read_text())
REFERENCE = {name: tuple(found) for name, found in RECORDED["inplace_abn"].items()}

# The same for torchvision 0.28 and, where it lacks a network, timm 1.0.31.
TORCHVISION = {name: tuple(found) for name, found in RECORDED["torchvision"].items()}

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
