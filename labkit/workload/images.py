"""From images as they are stored to a model's inputs, one batch at a time.

Images are augmented as they are stored, then resized, and then standardised. So a data set stays
in memory as bytes, and only a batch of it is ever in floating point.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from labkit.workload.random_numbers import sample_seeds, uniform

# How far a crop may move an image: the usual distance on 32 x 32 pixels; on digits, which are
# 8 x 8, four pixels would be half of the digit.
CROP_PIXELS = 4
SMALL_CROP_PIXELS = 1
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
        """Images [n, C, H, W] as new values in ``dtype``."""
        # As floats before ``div_``, and a copy even if they have this dtype already.
        values = images.to(dtype, copy=True, memory_format=torch.contiguous_format)
        mean, deviation = _by_channel(self.mean, dtype), _by_channel(self.deviation, dtype)
        return values.div_(self.white).sub_(mean).div_(deviation)


@dataclass(frozen=True)
class Transform:
    """What is done with the images of a batch.

    Attributes:
        dtype: of the result, if it is standardised or resized.
        standard: for stored pixels; None for values that are used as they are.
        crop: shift each image at random, by up to ``CROP_PIXELS`` in each direction, and fill with
            zeros (black, if these are pixels).
        flip: mirror half of the images left to right, at random.
        resize: height and width, with bilinear interpolation and antialiasing; None keeps them.
        seed: of the random numbers, which also depend on the epoch and on a sample's number.
    """

    dtype: torch.dtype = torch.float32
    standard: Standard | None = None
    crop: bool = False
    flip: bool = False
    resize: int | None = None
    seed: int = 0

    @property
    def changes(self) -> bool:
        """Whether it augments or resizes."""
        return self.crop or self.flip or self.resize is not None

    def __call__(self, images: Tensor, numbers: Tensor, epoch: int | None) -> Tensor:
        """The inputs [n, C, H', W'] made of stored images [n, C, H, W].

        Args:
            images: of any dtype; they stay as they are.
            numbers: of these samples in their data set, [n].
            epoch: counted from 0; None for images that are not augmented: held-out ones.

        Raises:
            ValueError: samples that are not images.
        """
        if images.dim() != 4 and self.changes:
            raise ValueError(
                "augment and resize are for images [channels, height, width], and the inputs of "
                f"dataset have shape {list(images.shape[1:])}: leave them out"
            )
        if epoch is not None and (self.crop or self.flip):
            images = self._augmented(images, uniform(sample_seeds(self.seed, epoch, numbers), 3))
        if self.resize is not None and images.shape[-2:] != (self.resize, self.resize):
            images = resized(images, self.resize, self.dtype)
        return self.standard(images, self.dtype) if self.standard else images

    def one_size(self, items: list[Any]) -> list[Any]:
        """Samples (image [C, H, W], target), resized one by one if their sizes differ."""
        shapes = {tuple(item[0].shape) for item in items if _is_image(item)}
        if len(shapes) < 2 or self.resize is None or not all(map(_is_image, items)):
            return items
        images = (torch.as_tensor(item[0])[None] for item in items)
        return [
            (resized(image, self.resize, self.dtype)[0], item[1])
            for image, item in zip(images, items)
        ]

    def _augmented(self, images: Tensor, draws: Tensor) -> Tensor:
        if self.crop:
            images = shifted(images, draws[:, :2])
        if self.flip:
            chosen = draws[:, 2] < 0.5
            images = torch.where(chosen.view(-1, 1, 1, 1), images.flip(-1), images)
        return images


def _is_image(item: Any) -> bool:
    return isinstance(item, (tuple, list)) and len(item) == 2 and getattr(item[0], "ndim", 0) == 3


@functools.cache
def _by_channel(values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
    return torch.tensor(values, dtype=dtype).view(1, -1, 1, 1)


def shifted(images: Tensor, draws: Tensor) -> Tensor:
    """Each image [n, C, H, W] moved by some pixels, with zeros where nothing was.

    ``draws`` [n, 2], from 0 to 1, say how far down and to the right.
    """
    height, width = images.shape[-2:]
    pad = SMALL_CROP_PIXELS if min(height, width) < _SMALL_PIXELS else CROP_PIXELS
    # The places at which an image of this size can be cut out of the padded one.
    cuts = functional.pad(images, (pad,) * 4).unfold(2, height, 1).unfold(3, width, 1)
    top, left = (draws * (2 * pad + 1)).long().unbind(1)
    return cuts[torch.arange(len(images)), :, top, left]


def resized(images: Tensor, pixels: int, dtype: torch.dtype) -> Tensor:
    """Images [n, C, H, W] as [n, C, pixels, pixels] in ``dtype``, whatever their proportions."""
    if not len(images):
        return images.new_empty((0, images.shape[1], pixels, pixels), dtype=dtype)
    values = images.to(dtype, memory_format=torch.contiguous_format)
    return functional.interpolate(values, (pixels, pixels), mode="bilinear", antialias=True)
