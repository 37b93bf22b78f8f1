"""Augmentation, size and scale of images."""

import pytest
import torch

from labkit.config import AUGMENTATIONS
from labkit.workload.images import Standard, Transform
from labkit.workload.random_numbers import seeded
from labkit.workload.samples import TensorSamples


@pytest.mark.parametrize(("size", "pad"), [(8, 1), (15, 1), (16, 4), (32, 4)])
def test_a_crop_is_cut_out_of_the_padded_image(size, pad):
    image = torch.randint(1, 256, (3, size, size + 2), dtype=torch.uint8)
    padded = torch.nn.functional.pad(image, (pad,) * 4)
    places = [(top, left) for top in range(2 * pad + 1) for left in range(2 * pad + 1)]
    cuts = [padded[:, top : top + size, left : left + size + 2] for top, left in places]
    with seeded(3):
        found = [Transform(augment=("crop",)).augmented(image) for _ in range(40)]
    drawn = {i for one in found for i, cut in enumerate(cuts) if torch.equal(one, cut)}
    assert all(any(torch.equal(one, cut) for cut in cuts) for one in found)
    assert len(drawn) > 5


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_each_augmentation_depends_on_seed_epoch_and_sample_alone(name, dtype, channels):
    images = torch.randint(0, 256, (40, channels, 20, 20), dtype=torch.uint8)
    standard = Standard(255, (0.0,) * channels, (1.0,) * channels)
    samples = TensorSamples(images, torch.arange(40), 40, Transform(dtype, standard, (name,)))
    whole, _ = samples.read(torch.arange(40), 0)
    assert whole.dtype == dtype
    assert 0 <= whole.min() <= whole.max() <= 1 + 1e-6
    plain, _ = samples.read(torch.arange(40))
    assert torch.equal(plain, images.to(dtype) / 255)
    assert 5 < sum(not torch.equal(a, b) for a, b in zip(whole, plain)) <= 40
    order = torch.randperm(40)
    parts = [samples.read(part, 0)[0] for part in order.split(7)]
    assert torch.equal(torch.cat(parts), whole[order])
    assert not torch.equal(samples.read(torch.arange(40), 1)[0], whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_resized_image_does_not_depend_on_the_others_of_its_batch(dtype):
    images = torch.randint(0, 256, (13, 3, 20, 9), dtype=torch.uint8)
    resized = Transform(dtype, resize=7).finished
    whole = resized(images)
    assert (whole.shape, whole.dtype) == ((13, 3, 7, 7), dtype)
    assert torch.equal(torch.cat([resized(part) for part in images.split(3)]), whole)
    assert torch.equal(torch.stack([resized(image) for image in images]), whole)
    assert resized(images[:0]).shape == (0, 3, 7, 7)
    uniform = resized(torch.full((1, 1, 5, 6), 9.0))
    torch.testing.assert_close(uniform, torch.full((1, 1, 7, 7), 9.0, dtype=dtype))


def test_pixels_become_values_around_zero():
    standard = Standard(255, (0.5, 0.25), (0.5, 0.125))
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 1, 1, 3).repeat(1, 2, 1, 1)
    found = standard(images, torch.float64)[0, :, 0]
    expected = torch.tensor([[-1, 1, -0.6], [-2, 6, -0.4]], dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    assert images.tolist() == [[[[0, 255, 51]], [[0, 255, 51]]]]


@pytest.mark.parametrize("change", [{"augment": ("crop",)}, {"resize": 4}])
def test_points_are_no_images(change):
    samples = TensorSamples(torch.ones(2, 5), torch.arange(2), transform=Transform(**change))
    with pytest.raises(ValueError, match=r"images \[channels, height, width\].*\[5\]"):
        samples.read(torch.arange(2), 0)
