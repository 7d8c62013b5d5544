"""ResNet-50, ResNet-101, VGG-16 and Inception V3 as lists of layers: parameters and work, from which buckets follow.

Only sizes: no tensor is made. Layers are those of He et al. 2015 (with batch normalisation, as torchvision builds them)
and Simonyan and Zisserman 2014, for images of 224 x 224, and of Szegedy et al. 2015, for 299 x 299.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from benchmarks.alpha_beta import Bucket, Step
from spark_hvd.torch.optimizer.buckets import MEGABYTE, ParamSpec, plan_buckets
from spark_hvd.torch.optimizer.plan import TAIL_BYTES
from spark_hvd.torch.optimizer.recipe import DEFAULT_CAP_MB

FORWARD_PART = 1 / 3
"""Of a step's work: backward computes gradients of inputs and of weights, each as much as forward."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer with parameters.

    Attributes:
        sizes: Elements of each of its parameters.
        work: Multiplications for one image.
    """

    sizes: tuple[int, ...]
    work: int


def _conv(inside: int, outside: int, kernel: int, side: int, *, other: int = 0, bias: bool = False) -> Layer:
    weights = inside * outside * kernel * (other or kernel)
    extra = (outside,) if bias else (outside, outside)  # a bias, or scale and shift of the normalisation after it
    return Layer((weights, *extra), weights * side * side)


def _full(inside: int, outside: int) -> Layer:
    return Layer((inside * outside, outside), inside * outside)


def resnet(blocks: tuple[int, int, int, int]) -> list[Layer]:
    """A ResNet of bottleneck blocks, with so many of them in each stage."""
    layers = [_conv(3, 64, 7, 112)]
    inside = 64
    for stage, count in enumerate(blocks):
        width, side = 64 << stage, 56 >> stage
        for number in range(count):
            before = side * 2 if stage and not number else side  # the 3 x 3 convolution has the stride
            layers += [_conv(inside, width, 1, before), _conv(width, width, 3, side), _conv(width, 4 * width, 1, side)]
            if not number:
                layers.append(_conv(inside, 4 * width, 1, side))
            inside = 4 * width
    return [*layers, _full(inside, 1000)]


def vgg16() -> list[Layer]:
    """VGG-16 without batch normalisation."""
    layers, inside = [], 3
    for stage, (width, count) in enumerate([(64, 2), (128, 2), (256, 3), (512, 3), (512, 3)]):
        for _ in range(count):
            layers.append(_conv(inside, width, 3, 224 >> stage, bias=True))
            inside = width
    return [*layers, _full(512 * 7 * 7, 4096), _full(4096, 4096), _full(4096, 1000)]


def inception_v3() -> list[Layer]:
    """Inception V3 without the second classifier, which only training with it has."""
    layers = [_conv(3, 32, 3, 149), _conv(32, 32, 3, 147), _conv(32, 64, 3, 147), _conv(64, 80, 1, 73)]
    layers.append(_conv(80, 192, 3, 71))

    def chain(side: int, *sizes: tuple[int, int, int]) -> None:
        """Convolutions after each other: channels in, height of the kernel, width; channels out are the next one's."""
        for (inside, high, wide), (outside, *_) in pairwise(sizes):
            layers.append(_conv(inside, outside, high, side, other=wide))

    end = (0, 0)
    for inside, pool in ((192, 32), (256, 64), (288, 64)):
        chain(35, (inside, 1, 1), (64, *end))
        chain(35, (inside, 1, 1), (48, 5, 5), (64, *end))
        chain(35, (inside, 1, 1), (64, 3, 3), (96, 3, 3), (96, *end))
        chain(35, (inside, 1, 1), (pool, *end))
    chain(17, (288, 3, 3), (384, *end))
    chain(35, (288, 1, 1), (64, 3, 3), (96, *end))
    chain(17, (96, 3, 3), (96, *end))
    for width in (128, 160, 160, 192):
        chain(17, (768, 1, 1), (192, *end))
        chain(17, (768, 1, 1), (width, 1, 7), (width, 7, 1), (192, *end))
        chain(17, (768, 1, 1), (width, 7, 1), (width, 1, 7), (width, 7, 1), (width, 1, 7), (192, *end))
        chain(17, (768, 1, 1), (192, *end))
    chain(17, (768, 1, 1), (192, *end))
    chain(8, (192, 3, 3), (320, *end))
    chain(17, (768, 1, 1), (192, 1, 7), (192, 7, 1), (192, *end))
    chain(8, (192, 3, 3), (192, *end))
    for inside in (1280, 2048):
        chain(8, (inside, 1, 1), (320, *end))
        chain(8, (inside, 1, 1), (384, 1, 3), (384, *end))
        chain(8, (384, 3, 1), (384, *end))
        chain(8, (inside, 1, 1), (448, 3, 3), (384, 1, 3), (384, *end))
        chain(8, (384, 3, 1), (384, *end))
        chain(8, (inside, 1, 1), (192, *end))
    return [*layers, _full(2048, 1000)]


MODELS = {"ResNet-50": resnet((3, 4, 6, 3)), "ResNet-101": resnet((3, 4, 23, 3)), "VGG-16": vgg16()}
MODELS["Inception V3"] = inception_v3()


def step_of(layers: list[Layer], seconds: float, cap_mb: float = DEFAULT_CAP_MB) -> Step:
    """The step of a model of these layers in float32, in the buckets that DistributedOptimizer plans for it.

    Args:
        layers: From the input to the output.
        seconds: Of a step on one rank; a layer's part of it is its part of the work.
        cap_mb: Upper bound of a bucket in MiB.
    """
    owner = [number for number, layer in enumerate(layers) for _ in layer.sizes]
    sizes = [size for layer in layers for size in layer.sizes]
    specs = [ParamSpec(str(index), (size,), (1,), torch.float32, "cpu") for index, size in enumerate(sizes)]
    cap = int(cap_mb * MEGABYTE)
    order = range(len(specs) - 1, -1, -1)
    plans = plan_buckets(specs, order, cap_bytes=cap, tail_bytes=min(TAIL_BYTES, cap))
    total = sum(layer.work for layer in layers)
    # Backward runs from the last layer to the first: after layer k, the work of k and of all behind it is done.
    done = list(accumulate(layer.work / total for layer in reversed(layers)))[::-1]
    buckets = tuple(Bucket(4 * plan.numel, min(1.0, done[owner[plan.members[-1]]])) for plan in plans)
    return Step(FORWARD_PART * seconds, (1 - FORWARD_PART) * seconds, buckets)
