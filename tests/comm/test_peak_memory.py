"""Peak memory: what counts, what does not, and that nothing is told where nothing is known."""

import gc
import json
import os
from types import SimpleNamespace

import pytest
import torch
from ranks import travel_by_value

import labkit
from labkit.comm import peak_memory
from labkit.comm.peak_memory import DeviceMemory, MemoryMeter, PeakMemory
from labkit.runtime.worker import _device_name
from labkit.tracing import Trace
from labkit.training.train_run import _on_devices

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
def test_code_of_libraries_that_is_used_for_the_first_time_is_not_the_rank_s_own():
    def small(comm):
        net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Flatten())
        net(torch.zeros(2, 1, 8, 8)).sum().backward()

    # Torch's kernels, read from its libraries, are some 30 MB.
    result = labkit.run(small, world_size=1, device="cpu")
    assert result.peak_memory[0].process_bytes < 15 * MB


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


def test_a_rank_that_fails_fails_as_before():
    def fails(comm):
        take(10)
        raise KeyError("as before")

    with pytest.raises(labkit.WorkerError, match="as before"):
        labkit.run(fails, world_size=2, device="cpu")


def test_on_several_machines_a_device_is_named_with_its_machine(monkeypatch):
    """Each machine has a cuda:0, and their ranks share no GPU."""
    monkeypatch.setenv("GROUP_RANK", "1")
    comm = SimpleNamespace(device=torch.device("cuda:0"), world_size=4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert _device_name(comm) == "cuda:0 of machine 1"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert _device_name(comm) == "cuda:0"


# Training


def test_a_technique_in_one_process_has_all_its_devices_in_its_lane():
    strategy = SimpleNamespace(in_one_process=True, devices=list(map(torch.device, GPUS)))
    assert _on_devices(Trace((), {0: "cuda:0"}), strategy).devices == {0: "cuda:0, cuda:1"}
    strategy.in_one_process = False
    assert _on_devices(Trace((), {0: "cuda:0"}), strategy).devices == {0: "cuda:0"}


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
def test_evaluation_is_no_part_of_the_steps():
    """A step has one sample; all held-out samples are evaluated at once."""
    layers = [torch.nn.Flatten(), torch.nn.Linear(64, 50_000), torch.nn.Linear(50_000, 10)]
    # Between the steps of two epochs there is an evaluation.
    settings = {"device": "cpu", "batch_size": 1, "train_size": 4, "momentum": 0.0, "epochs": 2}
    parameters_and_gradients = 2 * (75 * 50_000 + 10) * 4
    outputs = 360 * 50_000 * 4
    # Memory that the system took from the idle forkserver, and gives back during a run, adds to
    # some runs; an evaluation would add to all.
    for _ in range(3):
        (peak,) = labkit.train_with("single", model=layers, **settings).peak_memory
        if peak.process_bytes < parameters_and_gradients + outputs / 2:
            return
    raise AssertionError(f"an evaluation counts as a part of the steps: {peak}")


@on_linux
def test_a_model_that_is_given_as_an_object_counts_like_one_that_the_rank_makes():
    # Of blocks below 32 MB, the C library may keep some that are free.
    data = torch.zeros(4, 100_000), torch.tensor([0, 1, 0, 1])

    def large():
        return torch.nn.Linear(100_000, 100)

    common = {"device": "cpu", "dataset": data, "batch_size": 2, "momentum": 0.0}
    for model in (large, large(), [large()]):
        (peak,) = labkit.train_with("single", model=model, **common).peak_memory
        # Parameters and gradients.
        assert peak.process_bytes == around(2 * 40)


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


def statuses(monkeypatch, *rows, set_back=True):
    """Let the system say these sizes in MB one after the other: peak, anonymous, files, shared."""
    found = iter([dict(zip(peak_memory._FIELDS, row, strict=True)) for row in rows])
    monkeypatch.setattr(peak_memory, "_status", lambda: next(found))
    monkeypatch.setattr(MemoryMeter, "_set_back", lambda self: set_back)


def test_pages_of_files_do_not_count_and_shared_memory_does(monkeypatch):
    statuses(monkeypatch, (500, 300, 190, 10), (800, 310, 250, 20))
    assert MemoryMeter(CPU).total() == PeakMemory(800 - 250 - 310)


def test_pages_of_files_that_came_after_the_peak_do_not_hide_what_is_held(monkeypatch):
    statuses(monkeypatch, (500, 300, 190, 10), (800, 420, 370, 10))
    assert MemoryMeter(CPU).total() == PeakMemory(120)


def test_without_setting_back_only_a_peak_that_rose_is_told(monkeypatch):
    start, end = (900, 300, 190, 10), (1000, 300, 190, 10)
    statuses(monkeypatch, start, end, end, set_back=False)
    assert MemoryMeter(CPU).total() == PeakMemory(500)
    statuses(monkeypatch, start, start, start, set_back=False)
    assert MemoryMeter(CPU).total() == PeakMemory(None)
    statuses(monkeypatch, start, start, end, end, set_back=False)
    part = MemoryMeter(CPU).part()
    with part.counted():
        pass
    assert part.peak == PeakMemory(None)


def test_a_system_that_says_nothing_gives_none(monkeypatch, tmp_path):
    monkeypatch.setattr(peak_memory, "_STATUS", str(tmp_path / "absent"))
    monkeypatch.setattr(peak_memory, "_CLEAR_REFS", str(tmp_path / "absent" / "too"))
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


def test_a_gpu_on_which_nothing_was_allocated_is_named_only_if_it_is_the_rank_s(monkeypatch):
    Allocators(monkeypatch)
    found = MemoryMeter(torch.device("cuda:1")).total()
    assert found.devices == {"cuda:1": DeviceMemory(0, 0)}
    assert found.largest_bytes == 0


def test_a_rank_on_the_cpu_asks_no_gpu(monkeypatch):
    def asked(*args):
        raise AssertionError("a process that has not initialised CUDA asks for no GPU")

    for name in ("device_count", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, asked)
    meter = MemoryMeter(CPU)
    meter.lap()
    assert meter.total().devices == {}


def test_json_and_back():
    peak = PeakMemory(5, {"cuda:0": DeviceMemory(3, 4)})
    assert PeakMemory.of(json.loads(json.dumps(peak.as_dict()))) == peak
    assert PeakMemory.of(PeakMemory(None).as_dict()) == PeakMemory(None)
