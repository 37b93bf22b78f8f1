"""A rank's spans on pretended GPUs: one clock for all ranks, waits, and the right device."""

import fake_cuda
import pytest
import torch

from labkit.comm.board import Board
from labkit.comm.comm import Comm
from labkit.tracing import Trace
from labkit.tracing.limits import what_limited
from labkit.tracing.waits import waits_told
from labkit.training.split_run import _by_step

HOURS = 3600.0


@pytest.fixture
def machine(monkeypatch):
    return fake_cuda.install(monkeypatch)


class Meets:
    """A transport that only meets: at the end of the barrier all ranks have come."""

    ends_together = queues = False

    def __init__(self, board, came_s):
        self.board, self.came_s = board, came_s

    def barrier(self):
        self.board.ranks["origin_s"] = self.came_s


def started(machine, devices=("cuda:0", "cuda:1"), pause_s=3.0):
    """Two ranks of one machine that have started together, the second one last."""
    board, came_s = Board(2), [machine.now_s, machine.now_s + pause_s]
    machine.pass_s(pause_s)
    comms = [
        Comm(rank, 2, torch.device(device), Meets(board, came_s), board)
        for rank, device in enumerate(devices)
    ]
    for comm in comms:
        comm.session.start_together()
        assert comm.session.recorder.origin == came_s[1]
    return comms


def test_two_ranks_on_two_gpus_have_one_clock(machine):
    machine.call_s = 2e-5
    comms = started(machine)
    machine.pass_s(0.5)
    for device in ("cuda:0", "cuda:1"):
        machine.stream(device).free_s = machine.now_s
    at_s = machine.now_s - comms[0].session.recorder.origin
    for comm in comms:
        with comm.span("compute"):
            machine.stream(comm.device).work(1.0)
    first, second = (comm.session.spans()[0] for comm in comms)
    assert first.start_s == pytest.approx(at_s, abs=1e-4)
    assert second.start_s == pytest.approx(at_s, abs=2e-4)


def test_a_clock_that_drifts_is_set_right_at_the_end(machine):
    machine.drift.update({0: 3e-5, 1: -2e-5})
    comms = started(machine)
    machine.pass_s(2 * HOURS)
    at_s = machine.now_s - comms[0].session.recorder.origin
    for comm in comms:
        with comm.span("compute"):
            machine.stream(comm.device).work(1e-3)
    for comm in comms:
        (span,) = comm.session.spans()
        # Without the correction it would be 0.2 s and 0.14 s off.
        assert span.start_s == pytest.approx(at_s, abs=1e-3)
        assert span.duration_s == pytest.approx(1e-3, rel=0.01)


class Sent:
    """Counts nothing."""

    messages = num_bytes = 0


def exchange_between(machine, computes_s, op_s=0.01):
    """Both ranks compute, then send each other a message; returns the trace with waits told."""
    comms = started(machine)
    for comm, seconds in zip(comms, computes_s):
        with comm.span("compute"):
            machine.stream(comm.device).work(seconds)
    both_s = max(machine.stream(comm.device).free_s for comm in comms)
    for comm in comms:
        other = 1 - comm.rank
        comm.transport.sent = type("Traffic", (), {"to": {other: Sent()}})()
        start = comm.session.recorder.timer.mark()
        end = other, "float32 [1]"
        with comm.session.operation("exchange", end, end, start=start):
            stream = machine.stream(comm.device)
            stream.free_s = both_s + op_s
    machine.pass_s(5)
    return Trace.merge([waits_told(comm.session.spans() for comm in comms)])


@pytest.mark.parametrize("early", [0, 1])
def test_the_rank_that_came_first_waits_and_both_transfer_equally_long(machine, early):
    computes_s = [0.5, 0.5]
    computes_s[early] = 0.1
    trace = exchange_between(machine, computes_s)
    (waited,) = trace.of(early, "wait")
    assert waited.duration_s == pytest.approx(0.4, rel=1e-3)
    assert waited.peer == 1 - early
    assert sum(span.duration_s for span in trace.of(1 - early, "wait")) < 1e-4
    for rank in (0, 1):
        moved = sum(span.duration_s for span in trace.of(rank, "communicate"))
        assert moved == pytest.approx(0.01, rel=0.02)
    assert all(span.meets == () for span in trace.spans)


def test_a_straggler_is_named_by_what_the_others_waited(machine):
    limit = what_limited(exchange_between(machine, [0.2, 2.0]), start_s=0.0)
    assert (limit.kind, limit.rank) == ("straggler", 1)
    assert "waited for it" in limit.text


def test_a_barrier_on_a_gpu_is_waiting_and_comes_after_all_queued_work(machine):
    comm, _ = started(machine)
    with comm.span("compute"):
        machine.stream(comm.device).work(0.3)
    ends_s = machine.stream(comm.device).free_s
    comm.barrier()
    # A clock that is read now includes the queued work.
    assert machine.now_s >= ends_s
    assert [span.kind for span in comm.session.spans()] == ["compute", "wait"]


def test_the_barrier_before_a_step_is_no_part_of_the_step_and_no_step_is_lost(machine):
    comm, _ = started(machine)
    machine.call_s = 0.0
    for seconds in (0.1, 0.2, 0.3):
        machine.stream().work(0.7)  # until the other rank has come
        comm.barrier()
        with comm.span("data"):
            pass
        with comm.span("forward"):
            machine.stream().work(seconds)
        with comm.span("update"):
            machine.stream().work(0.01)
    steps = _by_step(Trace.merge([waits_told([comm.session.spans()])]))
    lengths_s = [max(s.end_s for s in t.spans) - t.spans[0].start_s for t in steps]
    assert lengths_s == pytest.approx([0.11, 0.21, 0.31], rel=1e-3)


@pytest.mark.parametrize(
    ("own", "devices", "busy"),
    [
        ("cpu", ("cpu", "cuda:0"), "cuda:0"),
        ("cpu", ("cuda:1", "cpu"), "cuda:1"),
        ("cuda:0", ("cuda:1", "cuda:2"), "cuda:2"),
        ("cuda:0", ("cuda:0",), "cuda:0"),
    ],
)
def test_spans_are_those_of_the_named_devices(machine, own, devices, busy):
    comm, _ = started(machine, (own, own))
    comm.session.time_on([torch.device(name) for name in devices])
    with comm.span("compute"):
        machine.stream(busy).work(0.7)
    with comm.span("update"):
        machine.pass_s(0.0)
    machine.pass_s(5)
    compute = comm.session.spans()[0]
    assert (compute.kind, compute.duration_s) == ("compute", pytest.approx(0.7, rel=1e-3))


def test_a_region_on_another_clock_leaves_the_outer_one_its_own(machine):
    comm, _ = started(machine, ("cpu", "cpu"))
    with comm.span("compute"):
        machine.pass_s(1.0)
        with comm.span("forward", torch.device("cuda:0")):
            machine.stream("cuda:0").work(0.2)
        machine.pass_s(2.0)
    seconds = Trace.merge([comm.session.spans()]).seconds_by_kind()
    assert seconds["forward"] == pytest.approx(0.2, rel=1e-3)
    assert seconds["compute"] == pytest.approx(3.0, rel=1e-3)
