"""Operations that are only queued, over a FifoTransport: what works elsewhere works here."""

import pytest
from fifo_transport import use_streams
from ranks import travel_by_value

import labkit

travel_by_value(__name__)


@pytest.fixture(autouse=True)
def over_streams(monkeypatch):
    use_streams(monkeypatch)

import torch

def ring(comm):
    mine = torch.full((3,), float(comm.rank))
    theirs = torch.empty(3)
    if comm.world_size > 1:
        comm.exchange(mine, (comm.rank+1)%comm.world_size, theirs, (comm.rank-1)%comm.world_size)
    assert comm.session.queue is not None
    return theirs.sum().item()

def test_a():
    assert labkit.run(ring, world_size=2).values == [3, 0]

def both(comm):
    o = torch.empty(2)
    comm.recv(o, 1-comm.rank)
    comm.send(o, 1-comm.rank)

def test_b():
    with pytest.raises(labkit.DeadlockError) as c:
        labkit.run(both, world_size=2, timeout_s=10)
    print(c.value)

def boths(comm):
    o = torch.empty(2)
    comm.send(o, 1-comm.rank)
    comm.recv(o, 1-comm.rank)

def test_c():
    with pytest.raises(labkit.DeadlockError) as c:
        labkit.run(boths, world_size=2, timeout_s=10)
    print(c.value)
