"""State-dict keys and shapes against mapillary/inplace_abn and torchvision."""

import zlib

import pytest
from torch_cases import keys_and_shapes, torch_shapes

from fnet import models
from fnet.interop import torch_keys

pytestmark = pytest.mark.slow

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

# The same for torchvision 0.28.
TORCHVISION = {
    "resnet18": (102, 0x34D030BD),
    "resnet34": (182, 0x888943B5),
    "resnet50": (267, 0x6AA4621C),
    "resnet101": (522, 0xCE4979FC),
    "resnet152": (777, 0xADD45A78),
}

# The same for the snapshot that scripts/test_vistas_single_gpu.py loads.
VISTAS = (212, 0x04DF3295)


def digest(shape_of):
    lines = sorted(f"{key} {shape}" for key, shape in shape_of.items())
    return len(lines), zlib.crc32("\n".join(lines).encode())


@pytest.mark.parametrize("name", REFERENCE)
def test_keys_and_shapes_match_the_reference(name):
    options = {"stem": "3x3"} if name.endswith("3x3") else {}
    assert digest(keys_and_shapes(name.split()[0], **options)) == REFERENCE[name]


@pytest.mark.parametrize("name", TORCHVISION)
def test_keys_and_shapes_of_resnets_match_torchvision(name):
    assert digest(keys_and_shapes(name, "torchvision")) == TORCHVISION[name]


def test_keys_and_shapes_of_deeplab_match_the_vistas_snapshot():
    body = models.get("wider_resnet38_a2", num_classes=None, dilated=True)
    assert digest(torch_shapes(models.deeplab(body, 4096, num_classes=65), "reference")) == VISTAS


@pytest.mark.parametrize("name", REFERENCE)
def test_recognizes_networks_by_their_keys(name):
    options = {"stem": "3x3"} if name.endswith("3x3") else {}
    reference_keys = keys_and_shapes(name.split()[0], **options)
    family_name = name.split()[0].removesuffix("_a2")
    assert torch_keys.recognize(reference_keys) == family_name
    deeplab_keys = [f"body.{key}" for key in reference_keys]
    assert torch_keys.recognize(deeplab_keys) == f"deeplab on {family_name}"
    if name in TORCHVISION:
        assert torch_keys.recognize(keys_and_shapes(name, "torchvision")) == name
    assert torch_keys.recognize([key for key in reference_keys if "mod3" not in key]) is None
