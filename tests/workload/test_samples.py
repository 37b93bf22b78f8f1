"""Batches of samples, and their way to a GPU."""

from types import SimpleNamespace

import torch
from torch.utils.data import Dataset

from labkit.workload.samples import DatasetSamples, TensorSamples, on_device

NUMBERS = [torch.tensor([4, 0, 4]), torch.tensor([], dtype=torch.int64), torch.tensor([2])]


class Squares(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.full((2,), float(index)), index**2


def test_batches_by_number_also_none_and_some_twice():
    in_memory = TensorSamples(torch.arange(5.0), torch.arange(5) ** 2)
    for samples in (in_memory, DatasetSamples(Squares(), torch.float64)):
        found = [targets.tolist() for _, targets in samples.batches(NUMBERS)]
        assert found == [(numbers**2).tolist() for numbers in NUMBERS]
    inputs = [inputs for inputs, _ in samples.batches(NUMBERS)]
    assert [tuple(one.shape) for one in inputs] == [(3, 2), (0, 2), (1, 2)]
    assert {one.dtype for one in inputs} == {torch.float64}


def test_a_copy_to_a_gpu_is_queued_and_one_to_the_host_is_waited_for():
    def part(calls):
        return SimpleNamespace(to=lambda device, **options: calls.append((device.type, options)))

    calls = []
    on_device([part(calls), part(calls)], torch.device("cuda:1"))
    on_device([part(calls)], torch.device("cpu"))
    queued = ("cuda", {"non_blocking": True})
    assert calls == [queued, queued, ("cpu", {"non_blocking": False})]
