"""Torch's weights: their names and shapes are the originals'."""

import zlib

import pytest
from torch_cases import in_torch, keys_and_shapes

from fnet import models
from fnet.interop import torch_keys

pytestmark = pytest.mark.slow

# Number of arrays, and crc32 of their sorted lines "key shape", of the state dicts of
# mapillary/inplace_abn 1.1's scripts/models, 1000 classes (of "3x3", with input_3x3=True).
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

# The same of torchvision 0.28.
TORCHVISION = {
    "resnet18": (102, 0x34D030BD),
    "resnet34": (182, 0x888943B5),
    "resnet50": (267, 0x6AA4621C),
    "resnet101": (522, 0xCE4979FC),
    "resnet152": (777, 0xADD45A78),
}

# Of the snapshot's parts that scripts/test_vistas_single_gpu.py reads.
VISTAS = (212, 0x04DF3295)


def digest(shape_of):
    lines = sorted(f"{key} {shape}" for key, shape in shape_of.items())
    return len(lines), zlib.crc32("\n".join(lines).encode())


@pytest.mark.parametrize("name", REFERENCE)
def test_names_and_shapes_are_the_references(name):
    options = {"stem": "3x3"} if name.endswith("3x3") else {}
    assert digest(keys_and_shapes(name.split()[0], **options)) == REFERENCE[name]


@pytest.mark.parametrize("name", TORCHVISION)
def test_names_and_shapes_of_resnets_are_torchvisions(name):
    assert digest(keys_and_shapes(name, "torchvision")) == TORCHVISION[name]


def test_names_and_shapes_of_a_deeplab_are_those_of_the_vistas_snapshot():
    body = models.get("wider_resnet38_a2", num_classes=None, dilated=True)
    assert digest(in_torch(models.deeplab(body, 4096, num_classes=65), "reference")) == VISTAS


@pytest.mark.parametrize("name", REFERENCE)
def test_a_network_is_recognised_by_its_names(name):
    options = {"stem": "3x3"} if name.endswith("3x3") else {}
    of_reference = keys_and_shapes(name.split()[0], **options)
    known = name.split()[0].removesuffix("_a2")
    assert torch_keys.recognise(of_reference) == known
    in_parts = [f"body.{key}" for key in of_reference]
    assert torch_keys.recognise(in_parts) == f"deeplab on {known}"
    if name in TORCHVISION:
        assert torch_keys.recognise(keys_and_shapes(name, "torchvision")) == name
    assert torch_keys.recognise([key for key in of_reference if "mod3" not in key]) is None
