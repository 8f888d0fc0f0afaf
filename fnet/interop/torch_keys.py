"""What torch calls the arrays of a network: mapillary/inplace_abn's names, and torchvision's."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from fnet.models.densenet import DEPTHS as DENSENETS
from fnet.models.resnet import DEPTHS as RESNETS
from fnet.models.resnext import DEPTHS as RESNEXTS
from fnet.models.wider_resnet import DEPTHS as WIDER_RESNETS

NAMES = ("reference", "torchvision")
"""mapillary/inplace_abn's, of all its networks; torchvision's, of ResNets."""

_LEAVES = {
    "kernel": "weight",
    "gamma": "weight",
    "scale": "weight",
    "beta": "bias",
    "bias": "bias",
    "running_mean": "running_mean",
    "running_var": "running_var",
}


def _block(m: re.Match[str]) -> str:
    return f"mod{int(m[1]) + 1}.block{int(m[2]) + 1}."


# Networks here have the reference's names but for two: a ResNet's are torchvision's, and a
# DenseNet's layers hold their two convolutions, where there two lists hold the layers'.
_REFERENCE: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"layer(\d)\.(\d+)\.(?=conv|bn)", lambda m: f"{_block(m)}convs."),
    (r"layer(\d)\.(\d+)\.downsample\.0\.", lambda m: f"{_block(m)}proj_conv."),
    (r"layer(\d)\.(\d+)\.downsample\.1\.", lambda m: f"{_block(m)}proj_bn."),
    (r"^(body\.)?(?=(conv|bn)\d)", r"\1mod1."),
    (r"^fc\.", "classifier.fc."),
    (r"(mod\d)\.(\d+)\.(convs[13])\.", r"\1.\3.\2."),
)

_CLASSIFIER = re.compile(r"(fc|classifier\.fc|cls|head)\.(kernel|weight|bias)")


def torch_key(name: str, names: str) -> str:
    """``"layer1.0.bn2.gamma" -> "mod2.block1.convs.bn2.weight"``, or torchvision's.

    Args:
      name: of an array here: its path in ``params`` or ``state``, with dots.
      names: one of `NAMES`.

    Raises:
      ValueError: for an array that these networks do not have.
    """
    module, _, leaf = name.rpartition(".")
    if leaf not in _LEAVES:
        raise ValueError(
            f"to_torch: {name} has no name in torch; there are those of networks for images, "
            f"whose arrays are called {', '.join(_LEAVES)}"
        )
    # Group norm and its activation are two layers here.
    key = f"{module.removesuffix('.norm')}.{_LEAVES[leaf]}"
    for pattern, replacement in _REFERENCE if names == "reference" else ():
        key = re.sub(pattern, replacement, key)
    return key


def namings(here: Iterable[str]) -> tuple[str, ...]:
    """Which of `NAMES` a network's arrays can have in torch, by their names here."""
    a_resnet = any(re.match(r"(body\.)?layer1\.", name) for name in here)
    return NAMES if a_resnet else NAMES[:1]


def is_classifier(name: str) -> bool:
    """Whether an array, by its name here or in torch, is of the layer that makes the logits."""
    return _CLASSIFIER.fullmatch(name) is not None


def recognise(keys: Iterable[str]) -> str | None:
    """Which network has these arrays in torch, by the blocks of its stages; None: none of these.

    A WiderResNet and its A2 form have the same arrays, and are told by the one name.
    """
    keys = tuple(keys)
    stages = defaultdict(set)
    for key in keys:
        if found := re.search(r"\b(?:layer|mod)(\d)\.(?:block|convs1\.)?(\d+)\.", key):
            stages[found[1]].add(found[2])
    counts = tuple(len(stages[stage]) for stage in sorted(stages))

    def has(pattern: str) -> bool:
        return any(re.search(pattern, key) for key in keys)

    depths: Mapping[int, tuple[int, ...]]
    if has(r"\btra2\."):
        family, depths = "densenet", DENSENETS
    elif len(counts) == 6:
        family, depths = "wider_resnet", WIDER_RESNETS
    elif has(r"\bmod2\.block1\.bn1\."):
        family, depths = "resnext", RESNEXTS
    else:
        three = has(r"\b(layer1\.0|mod2\.block1\.convs)\.conv3\.")
        family, depths = "resnet", {d: n for d, n in RESNETS.items() if (d >= 50) == three}
    depth = next((depth for depth, blocks in depths.items() if blocks == counts), None)
    if depth is None:
        return None
    return f"deeplab on {family}{depth}" if has(r"^body\.") else f"{family}{depth}"
