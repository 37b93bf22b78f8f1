"""DDP on a GPU, without one: what runs on which stream, and when, by the clocks of streams."""

import threading
from types import SimpleNamespace

import pytest
import simulated_gpu
import torch
from torch import nn

from labkit.comm.board import Board
from labkit.comm.session import Session
from labkit.comm.transport import Traffic
from labkit.comm.work import WorkQueue
from labkit.strategies.ddp import bucketed, naive
from labkit.strategies.ddp.bucketed import BucketedDDP

BACKWARD_MS, RING_MS = 10, 8


class Layer(nn.Module):
    """A layer with one parameter, whose backward is a kernel; ``done`` hears of its end."""

    def __init__(self, done=None):
        super().__init__()
        self.weight, self.done = nn.Parameter(torch.ones(3)), done

    def forward(self, inputs):
        return Kernel.apply(inputs * self.weight, self.done)


class Kernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values, done):
        ctx.done = done
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        simulated_gpu.kernel(BACKWARD_MS)
        if ctx.done:
            ctx.done()
        return gradient, None


@pytest.fixture
def comm(monkeypatch):
    """Of one rank on the simulated GPU; a ring is a kernel."""
    simulated_gpu.install(monkeypatch)
    monkeypatch.setattr(bucketed, "check_tensor", lambda tensor, device: None)
    monkeypatch.setattr(naive, "fast_ring_all_reduce", ring)
    monkeypatch.setattr(naive, "broadcast", lambda comm, tensor: tensor)
    session = Session(
        0, simulated_gpu.DEVICE, SimpleNamespace(sent=Traffic(), queues=False), Board(1)
    )
    return FakeComm(session)


class FakeComm:
    """What DDP and a work queue need of a Comm; hashable, as the queues are found by it."""

    rank, world_size, device = 0, 1, simulated_gpu.DEVICE

    def __init__(self, session):
        self.session, self.span = session, session.recorder.region


def ring(comm, tensor, op):
    with comm.span("all_reduce"):
        simulated_gpu.kernel(RING_MS)
    return tensor


def spans(comm, lane):
    found = [s for s in comm.session.recorder.spans() if s.lane == lane and s.duration_s]
    return [(s.kind, round(1e3 * s.start_s, 3), round(1e3 * s.end_s, 3)) for s in found]


def test_buckets_are_summed_during_backward_and_drawn_where_they_were(comm):
    replica = BucketedDDP(comm, nn.Sequential(*[Layer() for _ in range(3)]), bucket_mb=0)
    with comm.span("compute"):
        replica(torch.ones(3)).sum().backward()
    with comm.span("update"):
        simulated_gpu.kernel(1)
    # One after another, backward and rings would take 54 ms.
    assert spans(comm, 0) == [("compute", 0, 30), ("wait", 30, 38), ("update", 38, 39)]
    assert spans(comm, 1) == [("all_reduce", start, start + 8) for start in (10, 20, 30)]


def test_a_ring_that_blocks_the_host_does_not_block_backward(comm, monkeypatch):
    """Gloo and CUDA IPC wait on the host; the launches of backward go on in the meantime."""
    backward_ended, in_time = threading.Event(), []

    def blocking(comm, tensor, op):
        in_time.append(backward_ended.wait(5))

    monkeypatch.setattr(naive, "fast_ring_all_reduce", blocking)
    layers = [Layer(backward_ended.set), Layer(), Layer()]
    replica = BucketedDDP(comm, nn.Sequential(*layers), bucket_mb=0)
    replica(torch.ones(3)).sum().backward()
    assert in_time == [True] * 3


def test_whoever_waits_goes_on_after_the_operation_and_nobody_else(comm):
    queue = WorkQueue("test", comm)
    simulated_gpu.kernel(5)
    first = queue.add("first", lambda comm: simulated_gpu.kernel(20), [], [], is_waited_for=True)
    simulated_gpu.kernel(1)
    second = queue.add("second", lambda comm: simulated_gpu.kernel(2), [], [])
    first.done.wait(5)
    second.done.wait(5)
    assert simulated_gpu.current_stream().at_ms == 6
    first.wait()
    assert simulated_gpu.current_stream().at_ms == 25
    other = simulated_gpu.Stream()
    simulated_gpu.set_stream(other)
    second.wait()
    simulated_gpu.set_stream(None)
    assert other.at_ms == 27
    queue.end()
