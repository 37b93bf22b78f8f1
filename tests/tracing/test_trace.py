"""Spans, sums and the Chrome export."""

import itertools
import threading
import time

import pytest
from ranks import travel_by_value

from labkit import run
from labkit.tracing import Recorder, Span, Trace

travel_by_value(__name__)


class Steps:
    """A timer whose time is set by the test."""

    def __init__(self):
        self.now = 0.0

    def mark(self):
        return self.now

    def seconds(self, mark, origin):
        return mark - origin


def recorded(script):
    timer = Steps()
    recorder = Recorder(3, timer)
    script(recorder, timer)
    return [(s.kind, s.start_s, s.end_s, s.num_bytes) for s in recorder.spans()]


def test_a_transfer_inside_compute_cuts_it_in_two():
    def script(recorder, timer):
        with recorder.region("compute"):
            timer.now = 5.0
            recorder.transfer(2.0, 4.0, 100, peer=1)
            timer.now = 6.0

    assert recorded(script) == [
        ("compute", 0.0, 2.0, 0),
        ("communicate", 2.0, 4.0, 100),
        ("compute", 4.0, 6.0, 0),
    ]


def test_a_transfer_inside_a_phase_carries_its_name_and_waiting_is_apart():
    def script(recorder, timer):
        with recorder.region("share_reduce"):
            timer.now = 3.0
            recorder.transfer(0.0, 3.0, 8, peer=1, arrived=2.0)

    assert recorded(script) == [("wait", 0.0, 2.0, 0), ("share_reduce", 2.0, 3.0, 8)]


def test_nested_regions_do_not_overlap():
    def script(recorder, timer):
        with recorder.region("compute"):
            timer.now = 1.0
            with recorder.region("update"):
                timer.now = 2.0
            timer.now = 4.0

    assert recorded(script) == [
        ("compute", 0.0, 1.0, 0),
        ("update", 1.0, 2.0, 0),
        ("compute", 2.0, 4.0, 0),
    ]


def test_a_region_ends_when_its_body_raises():
    timer = Steps()
    recorder = Recorder(0, timer)

    def fails():
        with recorder.region("compute"):
            timer.now = 1.0
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert [span.kind for span in recorder.spans()] == ["compute"]


def test_sums_selections_and_order():
    late, early = Span(1, "wait", 2.0, 3.0), Span(0, "compute", 0.0, 2.0, 16, 1)
    trace = Trace.merge([[late], [early]])
    assert trace.spans == (early, late)
    assert trace.seconds_by_kind() == {"compute": 2.0, "wait": 1.0}
    assert trace.seconds_by_kind(rank=1) == {"wait": 1.0}
    assert trace.of(kind="wait") == [late]
    assert (trace.ranks, trace.kinds) == ([0, 1], ["compute", "wait"])


def test_a_thread_has_a_lane_of_its_own():
    timer = Steps()
    recorder = Recorder(0, timer)

    def beside():
        with recorder.region("all_reduce"):
            timer.now = 3.0

    with recorder.region("compute"):
        timer.now = 1.0
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        timer.now = 4.0
    trace = Trace.merge([recorder.spans()])
    # The main thread continues to compute: its span is not cut, and the sum counts both.
    assert [(s.kind, s.start_s, s.end_s, s.lane) for s in trace.spans] == [
        ("compute", 0.0, 4.0, 0),
        ("all_reduce", 1.0, 3.0, 1),
    ]
    assert trace.seconds_by_kind() == {"compute": 4.0, "all_reduce": 2.0}
    assert trace.seconds_by_kind(lane=0) == {"compute": 4.0}
    assert trace.of(0, lane=1) == [trace.spans[1]]


def test_real_spans_are_real_times_on_one_clock():
    def works(comm):
        import torch

        with comm.span("compute"):
            time.sleep(0.05 + 0.5 * comm.rank)
        if comm.rank == 0:
            comm.recv(torch.empty(1), 1)
        else:
            comm.send(torch.ones(1), 0)

    trace = run(works, world_size=2).trace
    for rank in (0, 1):
        (compute,) = trace.of(rank, "compute")
        assert 0.05 + 0.5 * rank <= compute.duration_s < 5
        spans = sorted(trace.of(rank), key=lambda span: span.start_s)
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in itertools.pairwise(spans))
    # Rank 0 is ready first, and its wait ends when rank 1 has computed.
    waited = trace.of(0, "wait")[0]
    assert 0 <= waited.end_s - trace.of(1, "compute")[0].end_s < 2
    assert not trace.of(1, "wait")
