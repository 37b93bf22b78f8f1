"""Augmentation, size and scale of a batch of images."""

import pytest
import torch

from labkit.workload.images import Standard, Transform, resized, shifted


@pytest.mark.parametrize(("size", "pad"), [(8, 1), (15, 1), (16, 4), (32, 4)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_crop_is_cut_out_of_the_padded_image(size, pad, channels):
    images = torch.randint(1, 256, (40, channels, size, size + 2), dtype=torch.uint8)
    before = images.clone()
    draws = torch.rand(40, 2)
    moved = shifted(images, draws)
    tops, lefts = (draws * (2 * pad + 1)).long().T.tolist()
    for image, found, top, left in zip(images, moved, tops, lefts):
        padded = torch.zeros(channels, size + 2 * pad, size + 2 + 2 * pad, dtype=torch.uint8)
        padded[:, pad:-pad, pad:-pad] = image
        assert torch.equal(found, padded[:, top : top + size, left : left + size + 2])
    assert torch.equal(images, before)
    assert moved.dtype == torch.uint8
    assert len(set(zip(tops, lefts))) > 5
    assert {*tops} <= {*range(2 * pad + 1)} >= {*lefts}


def test_half_of_the_images_are_mirrored():
    images = torch.randint(0, 256, (400, 3, 4, 5), dtype=torch.uint8)
    found = Transform(flip=True)(images, torch.arange(400), 0)
    same = (found == images).flatten(1).all(1)
    mirrored = (found == images.flip(-1)).flatten(1).all(1)
    assert (same ^ mirrored).all()
    assert 140 < mirrored.sum() < 260


def test_without_an_epoch_nothing_is_augmented():
    images = torch.randint(0, 256, (9, 3, 8, 8), dtype=torch.uint8)
    transform = Transform(crop=True, flip=True)
    assert torch.equal(transform(images, torch.arange(9), None), images)
    assert not torch.equal(transform(images, torch.arange(9), 0), images)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_resized_image_does_not_depend_on_the_others_of_its_batch(dtype):
    images = torch.randint(0, 256, (13, 3, 20, 9), dtype=torch.uint8)
    whole = resized(images, 7, dtype)
    assert whole.shape == (13, 3, 7, 7)
    assert whole.dtype == dtype
    parts = [resized(part, 7, dtype) for part in images.split(3)]
    assert torch.equal(torch.cat(parts), whole)
    assert resized(images[:0], 7, dtype).shape == (0, 3, 7, 7)
    # A uniform image stays uniform, and the mean of any image is kept roughly.
    assert torch.allclose(
        resized(torch.full((1, 1, 5, 6), 9.0), 11, dtype), torch.tensor(9.0).to(dtype)
    )


def test_pixels_are_resized_as_torchvision_resizes_them():
    from torchvision.transforms.functional import resize

    images = torch.randint(0, 256, (4, 3, 32, 20), dtype=torch.uint8)
    for pixels in (8, 48):
        theirs = resize(images.float(), [pixels, pixels], antialias=True)
        torch.testing.assert_close(resized(images, pixels, torch.float32), theirs)


def test_pixels_become_values_around_zero():
    standard = Standard(255, (0.5, 0.25), (0.5, 0.125))
    images = torch.tensor([0, 255, 51], dtype=torch.uint8).view(1, 1, 1, 3).repeat(1, 2, 1, 1)
    found = standard(images, torch.float64)[0, :, 0]
    expected = torch.tensor([[-1, 1, -0.6], [-2, 6, -0.4]], dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    assert images.tolist() == [[[[0, 255, 51]], [[0, 255, 51]]]]
    same = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    standard(same, torch.float64)
    assert same.unique().tolist() == [1]


@pytest.mark.parametrize("change", [{"crop": True}, {"flip": True}, {"resize": 4}])
def test_points_are_no_images(change):
    with pytest.raises(ValueError, match=r"images \[channels, height, width\].*\[5\]"):
        Transform(**change)(torch.ones(2, 5), torch.arange(2), 0)
