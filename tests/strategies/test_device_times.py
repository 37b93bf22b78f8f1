"""What strategies measure on pretended GPUs: the copy and not the queue, all work and not more."""

from contextlib import nullcontext
from types import SimpleNamespace

import fake_cuda
import pytest
import torch
from odd_models import sgd
from torch import nn

from labkit import gpus
from labkit.comm.comm import Comm
from labkit.strategies import local_gradients
from labkit.strategies.data_parallel import DataParallel
from labkit.strategies.local_gradients import LocalGradients
from labkit.strategies.model_parallel_one_process import ModelParallelOneProcess
from labkit.training import progress

COPY_S = 0.003


@pytest.fixture
def machine(monkeypatch):
    return fake_cuda.install(monkeypatch)


def lone(device="cpu"):
    transport = SimpleNamespace(ends_together=False, queues=False, barrier=lambda: None)
    comm = Comm(0, 1, torch.device(device), transport)
    comm.session.start_together()
    return comm


class Activation:
    """A tensor on a pretended device; it is copied on the streams that PyTorch uses for it."""

    nbytes = 4096

    def __init__(self, machine, device, pinned=False):
        self.machine, self.device, self.pinned = machine, torch.device(device), pinned

    def pin_memory(self):
        self.machine.pass_s(0.5)  # the host copies it, and not the bus
        return Activation(self.machine, self.device, pinned=True)

    def to(self, target, non_blocking=False, copy=False):
        assert copy
        return Activation(self.machine, target)._from(self, non_blocking)

    def copy_(self, other, non_blocking=False):
        return self._from(other, non_blocking)

    def _from(self, other, non_blocking):
        ends = other.device, self.device
        copying = self.machine.stream(next(d for d in ends if d.type == "cuda"))
        if all(device.type == "cuda" for device in ends):
            target = self.machine.stream(self.device)
            copying.wait_stream(target)
            copying.work(COPY_S)
            target.wait_stream(copying)
            return self
        is_pinned = self.pinned or other.pinned
        # Pageable memory takes twice as long, and the host waits for it.
        copying.work(COPY_S if is_pinned else 2 * COPY_S)
        if not (non_blocking and is_pinned):
            copying.synchronize()
        return self


@pytest.fixture
def hop(machine, monkeypatch):
    """Move an activation over the cut between two devices; the strategy and the seconds."""
    monkeypatch.setattr(
        torch, "empty_like", lambda t, device, pin_memory: Activation(machine, device, pin_memory)
    )

    def moved(source, target, before=lambda: None):
        strategy = ModelParallelOneProcess((1,), (source, target))
        strategy.setup(lone(), on_the_cpu(2), sgd)
        before()
        strategy.steps = 1
        at_s = machine.now_s
        strategy.move(Activation(machine, source), 0, "forward")
        strategy.host_s = machine.now_s - at_s
        machine.pass_s(10)
        (told,) = strategy.notes()["hops"]
        return strategy, told["median_s"]

    return moved


def on_the_cpu(num_layers):
    """A model whose layers stay where they are."""

    class Stays(nn.Linear):
        def to(self, *_):
            return self

    return nn.Sequential(*(Stays(2, 2) for _ in range(num_layers)))


@pytest.fixture(autouse=True)
def _stages_stay(monkeypatch):
    monkeypatch.setattr(nn.Module, "to", lambda self, *_, **__: self)


def test_a_hop_between_gpus_is_the_copy_without_the_queue_of_either(machine, hop):
    def queue():
        machine.stream("cuda:0").work(0.2)
        machine.stream("cuda:1").work(0.7)

    strategy, seconds = hop("cuda:0", "cuda:1", queue)
    assert seconds == pytest.approx(COPY_S, rel=0.01)
    # The host has only queued it.
    assert strategy.host_s < 1e-3
    assert "host_memory" not in strategy.notes()


@pytest.mark.parametrize("pair", [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cpu", "cuda:1")])
def test_a_hop_between_gpu_and_host_is_the_bus(machine, hop, pair):
    gpu = next(name for name in pair if name != "cpu")
    strategy, seconds = hop(*pair, lambda: machine.stream(gpu).work(0.2))
    assert seconds == pytest.approx(COPY_S, rel=0.01)
    assert strategy.notes()["host_memory"] == "pinned"
    # What the host computes with next has arrived.
    assert pair[1] != "cpu" or strategy.host_s > 0.2


def test_a_system_that_refuses_pinned_memory_is_named(hop, monkeypatch):
    def refuses(*_, **__):
        raise RuntimeError("CUDA error: out of memory (cudaHostAlloc)")

    monkeypatch.setattr(torch, "empty_like", refuses)
    strategy, seconds = hop("cuda:0", "cpu")
    assert seconds == pytest.approx(2 * COPY_S, rel=0.01)
    assert strategy.notes()["host_memory"] == "pageable"


def by_lane(comm):
    return {(s.lane, s.kind): s.duration_s for s in comm.session.spans() if s.duration_s > 1e-3}


@pytest.mark.parametrize("first", ["cuda:1", "cpu"])
def test_replicas_compute_on_their_own_gpus_and_the_first_device_waits(machine, first):
    comm = lone("cpu" if first == "cpu" else "cuda:0")
    strategy = DataParallel((first, "cuda:2", "cuda:3"))
    strategy.setup(comm, nn.Linear(2, 2), sgd)
    busy_s = {0: 0.2, 1: 0.5, 2: 0.9}

    def computes(index):
        if strategy.devices[index].type == "cuda":
            machine.stream(strategy.devices[index]).work(busy_s[index])
        return index

    assert strategy.parallel(computes, range(3)) == [0, 1, 2]
    # What comes next on the first device needs all outputs.
    if first == "cpu":
        assert machine.now_s >= machine.stream("cuda:3").free_s
    machine.pass_s(5)
    found = by_lane(comm)
    assert found[1, "compute"] == pytest.approx(0.5, rel=1e-2)
    assert found[2, "compute"] == pytest.approx(0.9, rel=1e-2)
    computed_s = found.get((0, "compute"), 0.0)
    assert computed_s == pytest.approx(0.0 if first == "cpu" else 0.2, rel=1e-2, abs=1e-3)
    assert computed_s + found[0, "wait"] == pytest.approx(0.9, rel=1e-2)


@pytest.fixture
def plain(monkeypatch):
    """Gradients of a rank on a GPU, computed on the CPU."""
    zeros, scaler = torch.zeros, SimpleNamespace(scale=lambda loss: loss)
    monkeypatch.setattr(torch, "zeros", lambda *size, device=None, **kw: zeros(*size, **kw))
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *_, **__: scaler)


def test_a_straggler_is_not_slowed_down_for_what_was_queued_before(machine, plain, monkeypatch):
    naps = []
    clock = SimpleNamespace(perf_counter=lambda: machine.now_s, sleep=naps.append)
    monkeypatch.setattr(local_gradients, "time", clock)
    model = nn.Linear(2, 2)
    model.register_forward_hook(lambda *_: machine.stream().work(0.25))
    device = torch.device("cuda:0")
    comm = SimpleNamespace(rank=0, device=device, span=lambda kind: nullcontext())
    gradients = LocalGradients(comm, model, straggler=(0, 3.0))
    for _ in range(3):
        machine.stream().work(8.0)  # the copy of the next batch, or the last update
        gradients.add(torch.ones(2, 2), torch.zeros(2, dtype=torch.long))
    assert naps == pytest.approx([0.5, 0.5], rel=1e-3)


def test_only_a_straggler_waits_for_its_gpu(machine, plain):
    comm = SimpleNamespace(rank=1, device=torch.device("cuda:0"), span=lambda kind: nullcontext())
    gradients = LocalGradients(comm, nn.Linear(2, 2), straggler=(0, 3.0))
    gradients.add(torch.ones(2, 2), torch.zeros(2, dtype=torch.long))
    assert machine.waits == []


@pytest.mark.parametrize("devices", [(), ("cuda:1", "cuda:2"), ("cpu", "cuda:1")])
def test_an_epoch_ends_when_all_its_devices_have_ended(machine, monkeypatch, devices):
    monkeypatch.setattr(progress, "time", machine.clock())
    own = torch.device("cpu" if "cpu" in devices else "cuda:0")
    strategy = SimpleNamespace(
        comm=SimpleNamespace(device=own), devices=[torch.device(name) for name in devices]
    )
    before_s = progress.now_s(strategy)
    for place, name in enumerate(dict.fromkeys([own, *strategy.devices])):
        if name.type == "cuda":
            machine.stream(name).work(1.0 + place)
    last = max(machine.stream(d).free_s for d in [own, *strategy.devices] if d.type == "cuda")
    assert progress.now_s(strategy) == last > before_s


def test_every_used_gpu_is_waited_for_and_no_other(machine, monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(str(device)))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", lambda i: i in (1, 3), raising=False)
    gpus.synchronize_used("cpu")
    assert waited == ["cuda:1", "cuda:3"]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    gpus.synchronize_used("cuda:2")
    assert waited[2:] == ["cuda:2"]
