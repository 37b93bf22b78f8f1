"""What strategies measure on pretended GPUs: the copy and not the queue, all work and not more."""

from types import SimpleNamespace

import fake_cuda
import pytest
import torch
from odd_models import sgd
from torch import nn

from labkit.comm.comm import Comm
from labkit.strategies.data_parallel import DataParallel
from labkit.strategies.model_parallel_one_process import ModelParallelOneProcess
from labkit.training import evaluation

COPY_S = 0.003


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(nn.Module, "to", lambda self, *_, **__: self)
    return fake_cuda.install(monkeypatch)


def lone(device):
    comm = Comm(0, 1, torch.device(device), SimpleNamespace(barrier=lambda: None))
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

    def copy_(self, other, non_blocking):
        ends = other.device, self.device
        copying = self.machine.stream(next(d for d in ends if d.type == "cuda"))
        if all(device.type == "cuda" for device in ends):
            target = self.machine.stream(self.device)
            copying.wait_stream(target)
            copying.work(COPY_S)
            target.wait_stream(copying)
            return
        is_pinned = self.pinned or other.pinned
        # Pageable memory takes twice as long, and the host waits for it.
        copying.work(COPY_S if is_pinned else 2 * COPY_S)
        if not (non_blocking and is_pinned):
            copying.synchronize()


@pytest.mark.parametrize(
    ("source", "target"), [("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("cpu", "cuda:1")]
)
def test_a_hop_is_the_copy_without_the_queues_of_its_devices(machine, monkeypatch, source, target):
    monkeypatch.setattr(
        torch, "empty_like", lambda t, device, pin_memory: Activation(machine, device, pin_memory)
    )
    strategy = ModelParallelOneProcess((1,), (source, target))
    strategy.setup(lone("cpu"), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), sgd)
    strategy.is_warm = True
    for seconds, name in ((0.2, source), (0.7, target)):
        if name != "cpu":
            machine.stream(name).work(seconds)
    begun_s = machine.now_s
    strategy.move(Activation(machine, source), 0, "forward")
    # Only a host that computes with it next waits for it.
    assert (machine.now_s - begun_s > 0.2) == ("cpu" in (source, target))
    machine.pass_s(10)
    (hop,) = strategy.notes()["hops"]
    assert hop["median_s"] == pytest.approx(COPY_S, rel=0.01)


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
    spans = [span for span in comm.session.spans() if span.duration_s > 1e-3]
    found = {(span.lane, span.kind): span.duration_s for span in spans}
    assert found[1, "compute"] == pytest.approx(0.5, rel=1e-2)
    assert found[2, "compute"] == pytest.approx(0.9, rel=1e-2)
    computed_s = found.get((0, "compute"), 0.0)
    assert computed_s == pytest.approx(0.0 if first == "cpu" else 0.2, rel=1e-2, abs=1e-3)
    assert computed_s + found[0, "wait"] == pytest.approx(0.9, rel=1e-2)


@pytest.mark.parametrize("devices", [(), ("cuda:1", "cuda:2"), ("cpu", "cuda:1")])
def test_an_epoch_ends_when_all_its_devices_have_ended(machine, monkeypatch, devices):
    monkeypatch.setattr(evaluation, "time", machine.clock())
    own = torch.device("cpu" if "cpu" in devices else "cuda:0")
    strategy = SimpleNamespace(
        comm=SimpleNamespace(device=own), devices=[torch.device(name) for name in devices]
    )
    before_s = evaluation.now_s(strategy)
    for place, name in enumerate(dict.fromkeys([own, *strategy.devices])):
        if name.type == "cuda":
            machine.stream(name).work(1.0 + place)
    last = max(machine.stream(d).free_s for d in [own, *strategy.devices] if d.type == "cuda")
    assert evaluation.now_s(strategy) == last > before_s
