"""From images as they are stored to a model's inputs: augmented, resized and standardised.

A data set stays in memory as bytes, and only a batch of it is ever in floating point. The work is
done by torchvision's transforms, which draw random numbers from torch's global generator: whoever
calls ``augmented`` has seeded it for this sample.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from labkit.workload.models import import_torchvision

# How far a crop may move an image: the usual distance on 32 x 32 pixels; on digits, which are
# 8 x 8, four pixels would be half of the digit.
CROP_PIXELS, SMALL_CROP_PIXELS = 4, 1
_SMALL_PIXELS = 16


@dataclass(frozen=True)
class Standard:
    """What turns stored pixels into values with mean 0 and deviation 1 in each channel.

    Attributes:
        white: the largest possible pixel value.
        mean, deviation: of the training images by channel, pixels scaled to 0 .. 1.
    """

    white: int
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __call__(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        """Images [..., C, H, W] as new values in ``dtype``."""
        return self.centred(images.to(dtype).div(self.white))

    def centred(self, values: Tensor) -> Tensor:
        """Values from 0 to 1 with mean 0 and deviation 1."""
        mean, deviation = (
            torch.tensor(numbers, dtype=values.dtype).view(-1, 1, 1)
            for numbers in (self.mean, self.deviation)
        )
        return values.sub(mean).div_(deviation)


@dataclass(frozen=True)
class Transform:
    """What is done with images, of a batch or one by one.

    Attributes:
        dtype: of the result, if it is standardised or resized.
        standard: for stored pixels; None for values that are used as they are.
        augment: names of ``config.AUGMENTATIONS``. ``crop`` moves an image by ``CROP_PIXELS`` at
            most and fills with black. Colours of images are bytes, or numbers from 0 to 1.
        resize: height and width, with bicubic interpolation and antialiasing; None keeps them.
        seed: of the random numbers, which also depend on the epoch and on a sample's number.
    """

    dtype: torch.dtype = torch.float32
    standard: Standard | None = None
    augment: tuple[str, ...] = ()
    resize: int | None = None
    seed: int = 0

    @property
    def changes(self) -> bool:
        """Whether it augments or resizes."""
        return bool(self.augment) or self.resize is not None

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if samples of this shape are no images."""
        if self.changes and len(shape) != 3:
            raise ValueError(
                "augment and resize are for images [channels, height, width], and the inputs of "
                f"dataset have shape {list(shape)}: leave them out"
            )

    def scaled(self, images: Tensor) -> Tensor:
        """Stored images [..., C, H, W] with pixels from 0 to 1."""
        return images.to(self.dtype).div(self.standard.white) if self.standard else images

    def augmented(self, image: Tensor) -> Tensor:
        """A scaled image [C, H, W], changed at random."""
        return _augmentations(self.augment, *image.shape[-2:])(image)

    def finished(self, images: Tensor) -> Tensor:
        """Scaled images [..., C, H, W] as a model's inputs."""
        if self.resize is not None and images.shape[-2:] != (self.resize, self.resize):
            from torchvision.transforms import v2

            bicubic = v2.InterpolationMode.BICUBIC
            size = [self.resize, self.resize]
            images = v2.functional.resize(images.to(self.dtype), size, bicubic, antialias=True)
        return self.standard.centred(images) if self.standard else images


@functools.cache
def _augmentations(names: tuple[str, ...], height: int, width: int) -> Callable[[Tensor], Tensor]:
    import_torchvision()
    from torchvision.transforms import v2

    pad = SMALL_CROP_PIXELS if min(height, width) < _SMALL_PIXELS else CROP_PIXELS
    known = {
        "crop": v2.RandomCrop((height, width), padding=pad),
        "flip": v2.RandomHorizontalFlip(),
        "randaugment": v2.RandAugment(),
        "colorjitter": v2.ColorJitter(brightness=0.4, contrast=0.4, saturation=0.4),
        "erasing": v2.RandomErasing(),
    }
    return v2.Compose([change for name, change in known.items() if name in names])
