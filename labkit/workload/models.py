"""The models of the course, each a flat ``nn.Sequential`` of layers; ``transformer`` has the GPT.

Flat, so that a split point is an index into it and a stage is a slice of it. No forward pass draws
random numbers (no dropout), no activation works in place. Most models were published for larger
images than the course's 8x8 digits: on small images their stems keep every pixel, and layers that
would shrink a map too far lose their stride or pooling; all other layers are as published.

Shapes: N samples, C channels, H x W pixels, K classes. Inputs are [N, C, H, W], outputs [N, K].
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from labkit.extras import require
from labkit.units import check_choice
from labkit.workload.transformer import gpt

# Images up to this width count as small: a stem made for ImageNet discards most of their pixels.
SMALL_IMAGE_PIXELS = 64
# 2 x 2 pixels: BatchNorm needs several values per channel, even if a rank has one sample.
SMALLEST_NORMALIZED_MAP = 2

# Configuration D, Simonyan and Zisserman (2015), table 1: channels of the 3x3 convolutions.
VGG16_CHANNELS = (
    *(64, 64, "pool", 128, 128, "pool", 256, 256, 256, "pool"),
    *(512, 512, 512, "pool", 512, 512, 512, "pool"),
)


def build_model(
    name: str,
    *,
    num_classes: int,
    input_shape: tuple[int, ...],
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> nn.Sequential:
    """Build model ``name`` for inputs [N, ``*input_shape``], outputs [N, num_classes], on the CPU.

    The same seed gives the same parameters in every process, and in float64 the same values as in
    float32; the caller's random state is not changed. ValueError for an unknown name, or inputs
    that the model does not take: those of ``TEXT_MODELS`` take texts [length], others images.
    """
    check_choice("model", name, MODELS)
    reads_text = name in TEXT_MODELS
    if len(input_shape) != (1 if reads_text else 3):
        kind, remedy = "images [channels, height, width]", "another model"
        if reads_text:
            kind, remedy = "texts [length]", "dataset text, or another model"
        raise ValueError(
            f"model {name} takes {kind}, and the inputs have shape {list(input_shape)}: use "
            f"{remedy}"
        )
    # The CPU generator alone: torch.manual_seed would also touch CUDA, which the parent of the
    # workers must never initialize.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        layers = list(_BUILDERS[name](tuple(input_shape), num_classes))
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.ReLU | nn.ReLU6):
            module.inplace = False
    return model.to(dtype)


def mlp(input_shape: tuple[int, int, int], num_classes: int) -> Iterable[nn.Module]:
    """Two hidden layers of 64 units: 9,000 parameters on digits, for fast tests."""
    yield from (nn.Flatten(), nn.Linear(math.prod(input_shape), 64), nn.Tanh())
    yield from (nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_classes))


def small_cnn(input_shape: tuple[int, int, int], num_classes: int) -> Iterable[nn.Module]:
    """Two convolutions and a linear layer: 29,066 parameters on digits, the course's default.

    Made for comparisons across devices: no batch statistics, and smooth everywhere (SiLU, average
    pooling), because a kink amplifies rounding differences between runs. The second pooling
    reduces larger images to about 4x4; digits are 4x4 after the first.
    """
    channels, height, width = input_shape
    yield from (_conv3x3(channels, 32, min(height, width)), nn.SiLU(), nn.AvgPool2d(2))
    height, width = height // 2, width // 2
    yield from (_conv3x3(32, 64, min(height, width)), nn.SiLU())
    kernel = max(1, min(height, width) // 4)
    if kernel > 1:
        yield nn.AvgPool2d(kernel)
    num_values = 64 * (height // kernel) * (width // kernel)
    yield from (nn.Flatten(), nn.Linear(num_values, num_classes))


def mobilenet(input_shape: tuple[int, int, int], num_classes: int) -> Iterable[nn.Module]:
    """MobileNetV2 (Sandler et al. 2018), torchvision's: 158 tensors, 2.24 million parameters."""
    channels, height, width = input_shape
    require("torchvision", "model mobilenet")
    # Here, and not at the top: the import takes a second in every process.
    from torchvision.models import mobilenet_v2

    model = mobilenet_v2(num_classes=num_classes)
    stem: Any = model.features[0]
    stride = 1 if min(height, width) <= SMALL_IMAGE_PIXELS else 2
    stem[0] = _he(nn.Conv2d(channels, 32, 3, stride, 1, bias=False))
    _limit_strides(model.features, min(height, width))
    yield from model.features
    yield from (nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.classifier[-1])


def vgg16(input_shape: tuple[int, int, int], num_classes: int) -> Iterable[nn.Module]:
    """The 31 feature layers of VGG16 and one linear layer: 14.7 million parameters.

    The indices of the feature layers are torchvision's at every image size: a pooling layer that
    would leave no pixel (the last two of the five on 8x8) becomes an identity. The published
    classifier, of 120 million parameters, is replaced by an average pooling and a linear layer.
    Without normalization, the model learns digits at a rate of 0.005 and fails at 0.02.
    """
    channels, height, width = input_shape
    size = min(height, width)
    for entry in VGG16_CHANNELS:
        if entry == "pool":
            yield nn.MaxPool2d(2) if size >= 2 else nn.Identity()
            size = max(size // 2, 1)
        else:
            yield from (_conv3x3(channels, entry, size), nn.ReLU())
            channels = entry
    yield from (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, num_classes))


def _resnet(name: str, input_shape: tuple[int, int, int], num_classes: int) -> Iterable[nn.Module]:
    """ResNet-18 or -50 (He et al. 2016), torchvision's: 11.2 or 23.5 million parameters."""
    require("torchvision", f"model {name}")
    from torchvision import models

    channels, height, width = input_shape
    model = getattr(models, name)(num_classes=num_classes)
    if min(height, width) <= SMALL_IMAGE_PIXELS:
        # As in the paper's own CIFAR-10 networks (section 4.2).
        conv = nn.Conv2d(channels, 64, 3, stride=1, padding=1, bias=False)
        layers = [_he(conv), model.bn1, model.relu]
    else:
        conv = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
        layers = [_he(conv), model.bn1, model.relu, model.maxpool]
    layers += [*model.layer1, *model.layer2, *model.layer3, *model.layer4]
    _limit_strides(layers, min(height, width))
    yield from (*layers, model.avgpool, nn.Flatten(), model.fc)


def _he(conv: nn.Conv2d) -> nn.Conv2d:
    """Initialize a stem without bias as torchvision does (He et al. 2015, backward case)."""
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv


def _conv3x3(in_channels: int, out_channels: int, size: int) -> nn.Conv2d:
    """A padded 3x3 convolution that keeps the variance of a map ``size`` pixels wide.

    He et al. (2015), forward case, counting only the taps that meet a pixel: on average
    3 - 2 / size of 3 along each axis. Counting padding, too, VGG16's signal would fade on digits.
    """
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
    weight, bias = conv.parameters()
    nn.init.normal_(weight, std=math.sqrt(2 / in_channels) / (3 - 2 / size))
    nn.init.zeros_(bias)
    return conv


def _limit_strides(layers: Iterable[nn.Module], size: int) -> None:
    """Remove the stride of each layer that would shrink a map of ``size`` pixels too far."""
    # A residual block and its skip connection need the same stride.
    for layer in layers:
        shrinking = (m for m in layer.modules() if isinstance(m, nn.Conv2d | nn.MaxPool2d))
        strided = [module for module in shrinking if module.stride in (2, (2, 2))]
        if not strided:
            continue
        if math.ceil(size / 2) >= SMALLEST_NORMALIZED_MAP:
            size = math.ceil(size / 2)
        else:
            for module in strided:
                module.stride = (1, 1)


_BUILDERS: dict[str, Callable[[Any, int], Iterable[nn.Module]]] = {
    "small_cnn": small_cnn,
    "mlp": mlp,
    "mobilenet": mobilenet,
    "resnet18": partial(_resnet, "resnet18"),
    "vgg16": vgg16,
    "resnet50": partial(_resnet, "resnet50"),
    "gpt": gpt,
    # 8 experts in place of each MLP: 2.5 million parameters, of which a token uses a third.
    "moe_gpt": partial(gpt, num_experts=8),
}
MODELS = tuple(_BUILDERS)
TEXT_MODELS = ("gpt", "moe_gpt")
