"""How long a function took: until its GPU work has ended, too."""

from types import SimpleNamespace

import cloudpickle
import fake_cuda
import pytest
import torch
import torch.distributed as dist

from labkit.comm.board import Board
from labkit.comm.shared_memory import Arena
from labkit.runtime import torchrun, worker
from labkit.strategies import async_parameter_server
from labkit.strategies.async_parameter_server import AsyncParameterServer


@pytest.fixture
def machine(monkeypatch):
    return fake_cuda.install(monkeypatch)


def queues(comm):
    fake_cuda.Machine.installed.stream("cuda:0").work(3.0)


@pytest.fixture
def rank(machine, monkeypatch):
    """A rank on a GPU that is connected to nobody, and reports how long its function took."""
    comm = SimpleNamespace(rank=0, world_size=1, device=torch.device("cuda:0"))
    comm.session = SimpleNamespace(
        start_together=lambda: None,
        finish=lambda where: None,
        board=Board(1),
        hosts=((0,),),
    )
    for module in (worker, torchrun):
        monkeypatch.setattr(module, "connect", lambda *_, **__: comm)
        monkeypatch.setattr(module, "success", lambda comm, value, duration_s, *_: duration_s)
        monkeypatch.setattr(module, "seed_random_numbers", lambda rank: None)
        monkeypatch.setattr(module, "time", machine.clock())


def test_duration_of_a_run(rank):
    job = SimpleNamespace(
        call=cloudpickle.dumps((queues, ())), sources={}, plan=None, timeout_s=1, link=None
    )
    assert worker._call(job, 0, Arena(1), None) == pytest.approx(3.0)


def test_duration_under_torchrun(rank, monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setattr(torchrun, "own_store", lambda *_: dist.HashStore())
    monkeypatch.setattr(torchrun, "plan", lambda *_, **__: SimpleNamespace(note=""))
    monkeypatch.setattr(torchrun, "_exchange", lambda _, mine: [mine])
    assert torchrun.run_as_rank(queues, (), 1, "cuda", "auto", 10.0) == [pytest.approx(3.0)]


def test_epochs_of_the_asynchronous_server(machine, monkeypatch):
    monkeypatch.setattr(async_parameter_server, "time", machine.clock())

    def update(worker):
        machine.stream("cuda:0").work(0.5)

    server = AsyncParameterServer()
    server.comm = SimpleNamespace(
        device=torch.device("cuda:0"),
        span=lambda kind: fake_cuda._device(None),
        recv=lambda *_: None,
        progress=lambda *_, **__: None,
    )
    server.report, server.gradient, server.lost = torch.zeros(1), None, {}
    server.sums = torch.ones(3)
    server.tracker = SimpleNamespace(next=lambda: 1, pulled={})
    server.update = update
    server.answer = lambda *_, **__: None
    machine.stream("cuda:0").work(9.0)  # the set-up
    seconds = [passed_s for passed_s, _ in server.serve(shares=4, epochs=2)]
    assert seconds == pytest.approx([2.0, 4.0])
