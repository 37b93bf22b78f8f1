"""Peak memory: what counts, what does not, and that nothing is told where nothing is known."""

import gc
import json
import os

import pytest
import torch
from ranks import travel_by_value

import labkit
from labkit.comm import peak_memory
from labkit.comm.peak_memory import DeviceMemory, MemoryMeter, PeakMemory

travel_by_value(__name__)

CPU = torch.device("cpu")
GPUS = ("cuda:0", "cuda:1")
MB = 10**6


def can_set_back():
    try:
        with open(peak_memory._CLEAR_REFS, "wb", buffering=0) as file:
            file.write(b"5")
    except OSError:
        return False
    return bool(peak_memory._status())


on_linux = pytest.mark.skipif(not can_set_back(), reason="the system keeps no peak to set back")


def take(megabytes):
    """Touch so much memory, and free it."""
    torch.ones(megabytes * MB // 4)


def around(megabytes):
    return pytest.approx(megabytes * MB, abs=20 * MB)


# Runs


@on_linux
def test_what_one_rank_took_and_freed_is_its_peak_and_not_the_other_s():
    def uneven(comm):
        if comm.rank == 0:
            take(200)
        comm.barrier()

    result = labkit.run(uneven, world_size=2, device="cpu")
    took, other = (peak.process_bytes for peak in result.peak_memory)
    assert took == around(200)
    assert other < 20 * MB
    assert [peak.devices for peak in result.peak_memory] == [{}, {}]
    assert result.trace.devices == {0: "cpu", 1: "cpu"}


@on_linux
def test_a_rank_that_is_lost_has_no_peak():
    def leaves(comm):
        if comm.rank == 1:
            os._exit(3)
        take(100)

    result = labkit.run(leaves, world_size=2, device="cpu", may_lose=[1])
    assert result.peak_memory[0].process_bytes == around(100)
    assert result.peak_memory[1] is None
    assert result.trace.devices == {0: "cpu"}


# Training


def wide():
    """A model whose activations are large and whose parameters are not."""
    middle = [torch.nn.Tanh() for _ in range(8)]
    layers = [torch.nn.Flatten(), torch.nn.Linear(64, 2048), *middle, torch.nn.Linear(2048, 10)]
    return torch.nn.Sequential(*layers)


@on_linux
def test_four_micro_batches_per_update_hold_a_quarter_of_the_activations():
    common = {"world_size": 1, "device": "cpu", "batch_size": 1024, "train_size": 1024}
    whole, quarters = (
        labkit.train_with("ddp", model=wide, accumulate=count, **common) for count in (None, 4)
    )
    # The outputs of nine layers, [1024, 2048] each in float32.
    activations = 9 * 1024 * 2048 * 4
    peaks = [run.peak_memory[0].process_bytes for run in (whole, quarters)]
    assert peaks[0] > activations
    assert peaks[1] < 0.6 * peaks[0]
    assert whole.as_dict()["peak_memory"] == [{"process_bytes": peaks[0], "devices": {}}]


@on_linux
def test_a_model_that_is_given_as_an_object_counts_like_one_that_the_rank_makes():
    # Of blocks below 32 MB, the C library may keep some that are free.
    data = torch.zeros(4, 100_000), torch.tensor([0, 1, 0, 1])

    def large():
        return torch.nn.Linear(100_000, 100)

    common = {"device": "cpu", "dataset": data, "batch_size": 2}
    for model in (large, large(), [large()]):
        (peak,) = labkit.train_with("single", model=model, **common).peak_memory
        # Parameters, gradients and momentum.
        assert peak.process_bytes == around(3 * 40)


# The meter


@on_linux
def test_a_part_has_its_own_peak_and_the_whole_has_the_largest():
    gc.collect()
    take(200)
    meter = MemoryMeter(CPU)
    take(120)
    part = meter.part()
    with part.counted():
        take(60)
    take(90)
    with part.counted():
        take(40)
    take(20)
    assert part.peak.process_bytes == around(60)
    assert meter.total().process_bytes == around(120)


def test_a_system_that_says_nothing_gives_none(monkeypatch, tmp_path):
    monkeypatch.setattr(peak_memory, "_STATUS", tmp_path / "absent")
    monkeypatch.setattr(peak_memory, "_CLEAR_REFS", tmp_path / "absent" / "too")
    meter = MemoryMeter(CPU)
    part = meter.part(arrived_bytes=5)
    with part.counted():
        take(10)
    found = meter.total()
    assert part.peak == found == PeakMemory(None)
    assert (found.by_device, found.largest_bytes, str(found)) == ({}, None, "unknown")
    assert found.as_dict() == {"process_bytes": None, "devices": {}}


class Allocators:
    """In the place of ``torch.cuda``: the caching allocators of two GPUs."""

    def __init__(self, monkeypatch):
        self.allocated, self.reserved = [0, 0], [0, 0]
        self.peaks = [[0, 0], [0, 0]]
        for name in ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

        def waits(*args):
            raise AssertionError("reading a peak waits for the GPU")

        monkeypatch.setattr(torch.cuda, "synchronize", waits)

    def allocate(self, gpu, size, reserved=None):
        self.allocated[gpu] += size
        self.reserved[gpu] += size if reserved is None else reserved
        now = self.allocated[gpu], self.reserved[gpu]
        self.peaks[gpu] = [max(pair) for pair in zip(self.peaks[gpu], now)]

    def max_memory_allocated(self, gpu):
        return self.peaks[gpu][0]

    def max_memory_reserved(self, gpu):
        return self.peaks[gpu][1]

    def reset_peak_memory_stats(self, gpu):
        self.peaks[gpu] = [self.allocated[gpu], self.reserved[gpu]]


def test_on_gpus_each_device_that_was_used_counts_from_the_start_of_the_function(monkeypatch):
    gpus = Allocators(monkeypatch)
    gpus.allocate(0, 900)
    gpus.allocate(0, -800, reserved=0)
    meter = MemoryMeter(torch.device("cuda:0"))
    gpus.allocate(0, 200, reserved=0)
    gpus.allocate(0, -200, reserved=0)
    part = meter.part()
    with part.counted():
        gpus.allocate(0, 50, reserved=0)
    assert part.peak.devices == {"cuda:0": DeviceMemory(150, 900)}
    gpus.allocate(1, 70, reserved=80)
    gpus.allocate(1, -70, reserved=-80)
    found = meter.total()
    assert found.devices == {"cuda:0": DeviceMemory(300, 900), "cuda:1": DeviceMemory(70, 80)}
    assert found.by_device == {"cuda:0": 300, "cuda:1": 70}
    assert found.largest_bytes == 300
    assert str(found).startswith("cuda:0 300 B (900 B reserved), cuda:1 70 B (80 B reserved)")


def test_json_and_back():
    peak = PeakMemory(5, {"cuda:0": DeviceMemory(3, 4)})
    assert PeakMemory.of(json.loads(json.dumps(peak.as_dict()))) == peak
    assert PeakMemory.of(PeakMemory(None).as_dict()) == PeakMemory(None)
