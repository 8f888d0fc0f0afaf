"""Logits of torchvision's and timm's networks, in both directions."""

import chex
import jax
import numpy as np
import pytest

from fnet import models
from fnet.interop import families
from fnet.interop.torch import load_state_dict, to_torch

pytestmark = pytest.mark.slow

NETWORKS = [
    *(("torchvision", name) for name in ("resnet18", "resnet50", "resnext50_32x4d")),
    *(("torchvision", name) for name in ("wide_resnet50_2", "densenet121", "densenet161")),
    *(("timm", name) for name in ("resnet10t", "resnet34d", "resnet50c", "resnet50d", "resnet50s")),
    *(("timm", name) for name in ("resnet26t", "resnext50d_32x4d")),
]


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch", minversion="2.6")


def build(library, name):
    try:  # torchvision raises RuntimeError without its operators
        if library == "timm":
            return __import__("timm").create_model(name)
        return getattr(__import__("torchvision").models, name)(weights=None)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{library}: {error}")


def randomize(torch, network):
    """Give norms gammas of both signs, and statistics."""
    generator = torch.Generator().manual_seed(0)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1, generator=generator)
            module.running_var.uniform_(0.5, 1.5, generator=generator)
            with torch.no_grad():
                module.weight.uniform_(-1.2, 1.2, generator=generator)
                module.bias.normal_(0, 0.1, generator=generator)


@pytest.mark.parametrize(("library", "name"), NETWORKS)
def test_logits_equal_the_peers_in_both_directions(library, name, torch):
    peer = build(library, name).eval()
    randomize(torch, peer)
    x = np.random.default_rng(1).normal(size=(2, 3, 65, 65)).astype(np.float32)

    def logits(network):
        with torch.no_grad():
            return network(torch.from_numpy(x)).numpy()

    arrays = {key: t.numpy() for key, t in peer.state_dict().items()}
    weights = families.recognize({key: a.shape for key, a in arrays.items()})
    options = dict(weights.options) | {"norm": "batch", "activation": "relu"}
    name_and_depth = f"{weights.model}{options.pop('depth')}"
    network = models.get(name_and_depth, num_classes=weights.classes, **options)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    params, state, _ = load_state_dict(*shapes, arrays, norm="batch")

    apply = jax.jit(lambda params, state, x: network.apply(params, state, x, train=False)[0])
    images = np.transpose(x, (0, 2, 3, 1))
    chex.assert_trees_all_close(apply(params, state, images), logits(peer), atol=1e-4)

    params = jax.tree.map(lambda a: 1.1 * a, params)
    exported = to_torch(params, state, names="torchvision", norm="batch")
    counters = {k: t for k, t in peer.state_dict().items() if k.endswith("num_batches_tracked")}
    tensors = {key: torch.from_numpy(a) for key, a in exported.items()}
    peer.load_state_dict(tensors | counters, strict=True)
    actual = apply(params, state, images)
    chex.assert_trees_all_close(
        actual, logits(peer), atol=1e-4 * max(1, float(np.abs(actual).max()))
    )
