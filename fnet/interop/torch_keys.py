"""State-dict keys of a network's arrays: the names of mapillary/inplace_abn and of torchvision."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from fnet.models.densenet import DEPTHS as DENSENETS
from fnet.models.resnet import DEPTHS as RESNETS
from fnet.models.resnext import DEPTHS as RESNEXTS
from fnet.models.wider_resnet import DEPTHS as WIDER_RESNETS

NAMES = ("reference", "torchvision")
"""Naming schemes: mapillary/inplace_abn for all its networks, and torchvision for ResNets."""

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


# fnet's names are the reference's, with two exceptions: ResNets have torchvision's names, and each
# layer of a DenseNet contains its two convolutions, where the reference has two lists of them.
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
    """Convert an array's name to its torch key.

    ``"layer1.0.bn2.gamma"`` is ``"mod2.block1.convs.bn2.weight"`` in the reference.

    Args:
      name: path in ``params`` or ``state``, with dots.
      names: one of `NAMES`.

    Raises:
      ValueError: for an array that image networks do not have.
    """
    module, _, leaf = name.rpartition(".")
    if leaf not in _LEAVES:
        raise ValueError(
            f"to_torch: {name} has no name in torch; only image networks are supported, "
            f"whose arrays are called {', '.join(_LEAVES)}"
        )
    # In fnet, group norm and its activation are two layers.
    key = f"{module.removesuffix('.norm')}.{_LEAVES[leaf]}"
    for pattern, replacement in _REFERENCE if names == "reference" else ():
        key = re.sub(pattern, replacement, key)
    return key


def namings(variables: Iterable[str]) -> tuple[str, ...]:
    """Naming schemes of `NAMES` that exist for a network, given the names of its arrays."""
    is_resnet = any(re.match(r"(body\.)?layer1\.", name) for name in variables)
    return NAMES if is_resnet else NAMES[:1]


def is_classifier(name: str) -> bool:
    """Whether an array belongs to the classifier, by its name in fnet or in torch."""
    return _CLASSIFIER.fullmatch(name) is not None


def recognize(keys: Iterable[str]) -> str | None:
    """Recognize the network of a state dict by its blocks per stage; None if it is unknown.

    A WiderResNet and its variant A2 have the same arrays and get the same name.
    """
    keys = tuple(keys)
    stages = defaultdict(set)
    for key in keys:
        if match := re.search(r"\b(?:layer|mod)(\d)\.(?:block|convs1\.)?(\d+)\.", key):
            stages[match[1]].add(match[2])
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
        bottlenecks = has(r"\b(layer1\.0|mod2\.block1\.convs)\.conv3\.")
        family, depths = "resnet", {d: n for d, n in RESNETS.items() if (d >= 50) == bottlenecks}
    depth = next((depth for depth, blocks in depths.items() if blocks == counts), None)
    if depth is None:
        return None
    return f"deeplab on {family}{depth}" if has(r"^body\.") else f"{family}{depth}"
