"""Batches: read ahead by processes, or in pinned memory, from which a GPU copies."""

import os
from types import SimpleNamespace

import pytest
import torch
from ranks import is_alive, wait_until
from torch.utils.data import Dataset

from labkit.workload import samples
from labkit.workload.samples import DatasetSamples, TensorSamples, on_device

NUMBERS = [torch.tensor([4, 0, 4]), torch.tensor([], dtype=torch.int64), torch.tensor([2])]


class Squares(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.full((2,), float(index)), index**2


class Pids(Squares):
    def __getitem__(self, index):
        return index, os.getpid()


def test_reading_processes_stay_for_all_epochs_and_end_with_the_samples():
    before = torch.get_rng_state()
    data, found = DatasetSamples(Pids(), torch.float32), []
    for epoch in range(3):
        batches = list(data.batches(NUMBERS, 2, epoch=epoch))
        assert [inputs.tolist() for inputs, _ in batches] == [n.tolist() for n in NUMBERS]
        found.append({pid for _, pids in batches for pid in pids.tolist()})
    # A loop that was left, as at the end of a run that resumes.
    next(data.batches(NUMBERS, 2))
    batches = data.batches(NUMBERS[::-1], 2)
    assert [inputs.tolist() for inputs, _ in batches] == [n.tolist() for n in NUMBERS[::-1]]
    assert found[0] == found[1] == found[2]
    assert os.getpid() not in set().union(*found)
    assert torch.equal(torch.get_rng_state(), before)
    del data, batches
    assert wait_until(lambda: not any(map(is_alive, set().union(*found))), 10)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_own_tensors_are_read_ahead_too(num_workers):
    data = TensorSamples(torch.arange(5.0), torch.arange(5))
    batches = data.batches(NUMBERS, num_workers)
    assert [targets.tolist() for _, targets in batches] == [n.tolist() for n in NUMBERS]


@pytest.fixture
def pinned(monkeypatch):
    """The shapes of the pinned tensors that are made, without a GPU to pin them for."""
    made, empty = [], torch.empty

    def noting(*shape, pin_memory=False, **options):
        if pin_memory:
            made.append(tuple(*shape))
        return empty(*shape, **options)

    monkeypatch.setattr(samples.torch, "empty", noting)
    return made


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.uint16, torch.bool, torch.float64, torch.complex64]
)
def test_a_pinned_batch_has_the_same_samples(pinned, dtype):
    """Also none of them, some twice, and of tensors that are not contiguous."""
    inputs = torch.arange(60).view(2, 5, 6).transpose(0, 1)[..., ::2].to(dtype)
    data = TensorSamples(inputs, torch.arange(5))
    plain, fast = (list(data.batches(NUMBERS, pinned=way)) for way in (False, True))
    assert all(torch.equal(a, b) for pair in zip(plain, fast) for a, b in zip(*pair))
    # One batch at a time, and never the whole set.
    assert pinned == [(3, 2, 3), (3,), (0, 2, 3), (0,), (1, 2, 3), (1,)]


def test_on_the_cpu_nothing_is_pinned(pinned, monkeypatch):
    loaders = []
    monkeypatch.setattr(
        samples, "DataLoader", lambda *_, **options: loaders.append(options) or iter(())
    )
    list(TensorSamples(torch.ones(5), torch.ones(5)).batches(NUMBERS))
    list(DatasetSamples(Squares(), torch.float32).batches(NUMBERS, 2))
    list(DatasetSamples(Squares(), torch.float32).batches(NUMBERS, 2, pinned=True))
    assert pinned == []
    assert [loader["pin_memory"] for loader in loaders] == [False, True]


def test_a_copy_to_a_gpu_is_queued_and_one_to_the_host_is_waited_for():
    def part(calls):
        return SimpleNamespace(to=lambda device, **options: calls.append((device.type, options)))

    calls = []
    on_device([part(calls), part(calls)], torch.device("cuda:1"))
    on_device([part(calls)], torch.device("cpu"))
    queued = ("cuda", {"non_blocking": True})
    assert calls == [queued, queued, ("cpu", {"non_blocking": False})]
