"""Batches of samples: the same random numbers whatever was drawn before, and right inputs."""

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from labkit.training.config import AUGMENTATIONS
from labkit.workload.samples import Samples, Standard, Transform, share

NUMBERS = [torch.tensor([4, 0, 4]), torch.tensor([], dtype=torch.int64), torch.tensor([2])]


class Squares(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.full((2,), float(index)), index**2


def test_batches_by_number_also_none_and_some_twice():
    in_memory = TensorDataset(torch.arange(5.0), torch.arange(5) ** 2)
    for samples in (Samples(in_memory), Samples(Squares(), torch.float64)):
        found = [targets.tolist() for _, targets in samples.batches(NUMBERS)]
        assert found == [(numbers**2).tolist() for numbers in NUMBERS]
    inputs = [inputs for inputs, _ in samples.batches(NUMBERS)]
    assert [tuple(one.shape) for one in inputs] == [(3, 2), (0, 2), (1, 2)]
    assert {one.dtype for one in inputs} == {torch.float64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_each_augmentation_depends_on_seed_epoch_and_sample_alone(name, dtype):
    images = torch.randint(0, 256, (40, 3, 20, 20), dtype=torch.uint8)
    transform = Transform(Standard(255, (0.0,) * 3, (1.0,) * 3), (name,))
    samples = Samples(TensorDataset(images, torch.arange(40)), dtype, transform)
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
    assert samples.read(torch.arange(0), 0)[0].shape == (0, 3, 20, 20)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 8, 13])
def test_shares_are_contiguous_and_differ_by_one_at_most(size, count):
    batch = torch.randperm(size)
    shares = [share(batch, index, count) for index in range(count)]
    sizes = [len(part) for part in shares]
    assert torch.equal(torch.cat(shares), batch)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
