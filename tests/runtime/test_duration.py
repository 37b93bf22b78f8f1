"""How long a function took: until its GPU work has ended, too."""

from types import SimpleNamespace

import fake_cuda
import pytest
import torch

from labkit.comm.board import Board
from labkit.runtime import worker


def test_duration_of_a_run(monkeypatch):
    machine = fake_cuda.install(monkeypatch)
    monkeypatch.setattr(worker, "time", machine.clock())
    session = SimpleNamespace(board=Board(1), memory=None, spans=list)
    session.start_together = session.close = lambda: None
    comm = SimpleNamespace(rank=0, world_size=1, device=torch.device("cuda:0"), session=session)
    comm.messages = comm.bytes_sent = 0
    report = worker.call(comm, lambda _: machine.stream("cuda:0").work(3.0), (), lambda _: b"")
    assert report.duration_s == pytest.approx(3.0)
