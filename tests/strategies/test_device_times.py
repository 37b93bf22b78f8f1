"""What strategies measure on pretended GPUs: all work on a device, and not more."""

from types import SimpleNamespace

import fake_cuda
import pytest
import torch
from odd_models import sgd
from torch import nn

from labkit.comm.comm import Comm
from labkit.strategies.data_parallel import DataParallel
from labkit.training import progress


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr(nn.Module, "to", lambda self, *_, **__: self)
    return fake_cuda.install(monkeypatch)


@pytest.mark.parametrize("first", ["cuda:1", "cpu"])
def test_replicas_compute_on_their_own_gpus_and_the_first_device_waits(machine, first):
    transport = SimpleNamespace(barrier=lambda: None)
    comm = Comm(0, 1, torch.device("cpu" if first == "cpu" else "cuda:0"), transport)
    comm.session.start_together()
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
