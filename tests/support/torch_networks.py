"""Reference networks in numpy: evaluation from a torch state dict, in NCHW and OIHW.

Written after the scripts of mapillary/inplace_abn (models and modules) and torchvision's
models/resnet.py, without fnet or JAX.
"""

import itertools

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

EPS = 1e-5


class Network:
    """A state dict, with plain or in-place batch norm and leaky_relu of the given slope."""

    def __init__(self, state_dict, plain=False, slope=0.01):
        self.arrays, self.plain, self.slope = state_dict, plain, slope

    def conv(self, name, x, stride=1, dilation=1):
        w = self.arrays[f"{name}.weight"]
        window, groups = w.shape[-1], x.shape[1] // w.shape[1]
        pad, reach = dilation * (window // 2), dilation * (window - 1) + 1
        x = np.pad(x, [(0, 0), (0, 0), (pad, pad), (pad, pad)])
        patches = sliding_window_view(x, (reach, reach), (2, 3))
        patches = patches[:, :, ::stride, ::stride, ::dilation, ::dilation]
        parts = zip(np.split(patches, groups, 1), np.split(w, groups), strict=True)
        outputs = [np.tensordot(p, v, [(1, 4, 5), (1, 2, 3)]) for p, v in parts]
        return np.moveaxis(np.concatenate(outputs, -1), -1, 1)

    def norm(self, name, x, act=True):
        weight, bias, mean, var = (
            self.arrays[f"{name}.{leaf}"][None, :, None, None]
            for leaf in ("weight", "bias", "running_mean", "running_var")
        )
        scale = weight if self.plain else np.abs(weight) + EPS
        y = (x - mean) / np.sqrt(var + EPS) * scale + bias
        return self.act(y) if act else y

    def act(self, x):
        return np.where(x < 0, self.slope * x, x)

    def linear(self, name, x):
        return x.mean((2, 3)) @ self.arrays[f"{name}.weight"].T + self.arrays[f"{name}.bias"][None]

    def has(self, name):
        return any(key.startswith(f"{name}.") for key in self.arrays)

    def blocks(self, pattern, start):
        """Names of the existing blocks, ``pattern`` with numbers from ``start`` on."""
        names = map(pattern.format, itertools.count(start))
        return list(itertools.takewhile(self.has, names))


def pooled(x):
    x = np.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1)], constant_values=-np.inf)
    return sliding_window_view(x, (3, 3), (2, 3))[:, :, ::2, ::2].max((-2, -1))


def post_activation(net, x, convs, shortcut, stride, dilations=(1, 1)):
    y, last = x, 3 if net.has(f"{convs}conv3") else 2
    for i in range(1, last + 1):
        strided = i == (2 if last == 3 else 1)
        window = net.arrays[f"{convs}conv{i}.weight"].shape[-1]
        dilation = 1 if window == 1 else dilations[0 if strided else 1]
        y = net.conv(f"{convs}conv{i}", y, stride if strided else 1, dilation)
        y = net.norm(f"{convs}bn{i}", y, act=i < last)
    conv, norm = shortcut
    if net.has(conv):
        x = net.norm(norm, net.conv(conv, x, stride), act=False)
    return net.act(x + y)


def torchvision_features(net, x, part="", dilated=False):
    """Features of torchvision's ResNets, also dilated."""
    x = net.conv(f"{part}conv1", x, 2)
    x, before = pooled(net.norm(f"{part}bn1", x)), 1
    for stage in range(1, 5):
        rate = {3: 2, 4: 4}.get(stage, 1) if dilated else 1
        for i, block in enumerate(net.blocks(f"{part}layer{stage}.{{}}", 0)):
            shortcut = f"{block}.downsample.0", f"{block}.downsample.1"
            stride = 2 if stage > 1 and not i and rate == 1 else 1
            dilations = (rate if i else before), rate
            x = post_activation(net, x, f"{block}.", shortcut, stride, dilations)
        before = rate
    return x


def torchvision_deeplab_logits(net, x, dilations=(12, 24, 36)):
    """Logits of torchvision's DeepLabV3, before upsampling."""
    x = torchvision_features(net, x, "backbone.", dilated=True)
    head = "classifier.0"
    maps = [net.norm(f"{head}.convs.0.1", net.conv(f"{head}.convs.0.0", x))]
    for i, rate in enumerate(dilations, start=1):
        y = net.conv(f"{head}.convs.{i}.0", x, 1, rate)
        maps.append(net.norm(f"{head}.convs.{i}.1", y))
    last = f"{head}.convs.{len(maps)}"
    mean = net.norm(f"{last}.2", net.conv(f"{last}.1", x.mean((2, 3), keepdims=True)))
    maps.append(np.broadcast_to(mean, maps[0].shape))
    y = net.norm(f"{head}.project.1", net.conv(f"{head}.project.0", np.concatenate(maps, 1)))
    y = net.norm("classifier.2", net.conv("classifier.1", y))
    return net.conv("classifier.4", y) + net.arrays["classifier.4.bias"][None, :, None, None]


def resnet(net, x):
    x = pooled(net.norm("mod1.bn1", net.conv("mod1.conv1", x, 2)))
    for stage in range(2, 6):
        for i, block in enumerate(net.blocks(f"mod{stage}.block{{}}", 1)):
            shortcut = f"{block}.proj_conv", f"{block}.proj_bn"
            x = post_activation(
                net, x, f"{block}.convs.", shortcut, 2 if stage > 2 and not i else 1
            )
    return net.linear("classifier.fc", x)


def pre_activation(net, x, block, stride, dilation=1):
    a = net.norm(f"{block}.bn1", x)
    convs, bottleneck = f"{block}.convs.", net.has(f"{block}.convs.conv3")
    y = net.conv(f"{convs}conv1", a, stride, 1 if bottleneck else dilation)
    y = net.conv(f"{convs}conv2", net.norm(f"{convs}bn2", y), 1, dilation)
    if bottleneck:
        y = net.conv(f"{convs}conv3", net.norm(f"{convs}bn3", y))
    projected = net.has(f"{block}.proj_conv")
    return y + (net.conv(f"{block}.proj_conv", a, stride) if projected else x)


def stem(net, x):
    x = net.conv("mod1.conv1", x, 2)
    for i in (2, 3):
        if net.has(f"mod1.conv{i}"):
            x = net.conv(f"mod1.conv{i}", net.norm(f"mod1.bn{i - 1}", x))
    return pooled(x)


def resnext(net, x):
    x = stem(net, x)
    for stage in range(2, 6):
        for i, block in enumerate(net.blocks(f"mod{stage}.block{{}}", 1)):
            x = pre_activation(net, x, block, 2 if stage > 2 and not i else 1)
    return net.linear("classifier.fc", net.norm("bn_out", x))


def wider_features(net, x, a2=False, dilated=False, part=""):
    x = net.conv(f"{part}mod1.conv1", x)
    dilations = {5: 2, 6: 4, 7: 4} if dilated else {}
    for stage in range(2, 8):
        if stage <= (3 if a2 else 6):
            x = pooled(x)
        strided = stage in ((4,) if dilated else (4, 5, 6)) if a2 else False
        for i, block in enumerate(net.blocks(f"{part}mod{stage}.block{{}}", 1)):
            stride = 2 if strided and not i else 1
            x = pre_activation(net, x, block, stride, dilations.get(stage, 1))
    return net.norm(f"{part}bn_out", x)


def wider_resnet(net, x, a2=False):
    return net.linear("classifier.fc", wider_features(net, x, a2))


def densenet(net, x):
    x = stem(net, x)
    for stage in range(2, 6):
        if stage > 2:
            x = net.conv(f"tra{stage - 1}.conv", net.norm(f"tra{stage - 1}.bn", x))
            n, c, h, w = x.shape
            x = x.reshape(n, c, h // 2, 2, w // 2, 2).mean((3, 5))
        for narrow in net.blocks(f"mod{stage}.convs1.{{}}", 0):
            wide = narrow.replace("convs1", "convs3")
            y = net.conv(f"{narrow}.conv", net.norm(f"{narrow}.bn", x))
            y = net.conv(f"{wide}.conv", net.norm(f"{wide}.bn", y))
            x = np.concatenate([x, y], 1)
    return net.linear("classifier.fc", net.norm("bn_out", x))


def deeplab_logits(net, x, dilations=(12, 24, 36)):
    """Logits of DeepLabV3 on the dilated WiderResNet A2, before upsampling."""
    x = wider_features(net, x, a2=True, dilated=True, part="body.")
    maps = [net.conv("head.map_convs.0", x)]
    for i, dilation in enumerate(dilations, start=1):
        maps.append(net.conv(f"head.map_convs.{i}", x, 1, dilation))
    y = net.conv("head.red_conv", net.norm("head.map_bn", np.concatenate(maps, 1)))
    mean = net.conv("head.global_pooling_conv", x.mean((2, 3), keepdims=True))
    mean = net.conv("head.pool_red_conv", net.norm("head.global_pooling_bn", mean))
    y = net.norm("head.red_bn", y + mean)
    return net.conv("cls", y) + net.arrays["cls.bias"][None, :, None, None]
