"""Times of GPU work, on pretended GPUs: what the arithmetic, the order and the clocks make of
events. Real GPUs: tests/gpu."""

import threading

import fake_cuda
import pytest
import torch

from labkit.comm.board import Board
from labkit.comm.session import SpanSums
from labkit.tracing import CudaTimer, JointTimer, Recorder, Trace

HOURS = 3600.0


@pytest.fixture
def machine(monkeypatch):
    return fake_cuda.install(monkeypatch)


def work(recorder, machine, kind, seconds, device="cuda:0"):
    with recorder.region(kind):
        machine.stream(device).work(seconds)


@pytest.mark.parametrize("late_s", [60, 35 * 60, 10 * HOURS])
def test_ten_microseconds_stay_ten_microseconds_however_long_the_run_is(machine, late_s):
    recorder = Recorder(0, CudaTimer("cuda:0"))
    while machine.now_s < 1000 + late_s:
        work(recorder, machine, "compute", 0.5)
        machine.pass_s(late_s / 40)
    for _ in range(50):
        work(recorder, machine, "update", 1e-5)
        machine.pass_s(3e-3)
    short = [span.duration_s for span in recorder.spans() if span.kind == "update"]
    # A record takes the host 2 us, and the span of a kernel includes it only on an idle stream.
    assert short == pytest.approx([1e-5] * 50, rel=0.01)


def test_short_spans_without_a_pause_add_up_to_the_elapsed_time(machine):
    recorder = Recorder(0, CudaTimer("cuda:0"))
    machine.call_s = 0.0
    for _ in range(10_000):
        work(recorder, machine, "compute", 1e-5)
    machine.pass_s(1.0)
    spans = recorder.spans()
    assert sum(span.duration_s for span in spans) == pytest.approx(0.1, rel=1e-6)
    assert spans[-1].end_s - spans[0].start_s == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("listens", [False, True])
def test_a_long_run_needs_few_events_and_waits_for_none(machine, listens):
    recorder = Recorder(0, CudaTimer("cuda:0"), keep=1000)
    if listens:
        recorder.listener = SpanSums(Board(1).ranks[0])
    before = len(machine.waits)
    for _ in range(30_000):
        work(recorder, machine, "compute", 1e-6)
        machine.pass_s(2e-6)
    assert len(machine.waits) == before
    assert machine.num_events < 600
    assert len(recorder.spans()) == 1000


def test_events_of_a_gpu_that_lags_behind_are_kept_until_it_has_passed_them(machine):
    board = Board(1)
    recorder = Recorder(0, CudaTimer("cuda:0"))
    recorder.listener = SpanSums(board.ranks[0])
    before = len(machine.waits)
    for _ in range(300):
        work(recorder, machine, "compute", 0.01)
    row = board.ranks[0]
    assert not row["kind_s"].any()
    made = machine.num_events
    machine.pass_s(10)
    for _ in range(300):
        work(recorder, machine, "compute", 0.01)
        machine.pass_s(0.02)
    assert machine.num_events <= made + 3
    assert len(machine.waits) == before
    assert row["kind_s"][0][0] == pytest.approx(600 * 0.01, rel=0.01)
    assert Trace.merge([recorder.spans()]).seconds_by_kind()["compute"] == pytest.approx(6.0)


def test_threads_and_side_streams_have_their_own_times(machine):
    recorder = Recorder(0, CudaTimer("cuda:0"))

    def beside():
        side = fake_cuda.Stream("cuda:0")
        with torch.cuda.stream(side), recorder.region("all_reduce"):
            side.work(0.3)

    with recorder.region("compute"):
        machine.stream().work(1.0)
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
    compute, ring = sorted(recorder.spans(), key=lambda span: span.lane)
    assert (compute.lane, ring.lane) == (0, 1)
    assert compute.duration_s == pytest.approx(1.0, rel=1e-3)
    assert ring.duration_s == pytest.approx(0.3, rel=1e-3)
    # They overlap: the side stream does not wait for the kernel.
    assert ring.end_s < compute.end_s


def test_an_empty_mark_divides_steps_even_if_both_of_its_events_are_at_the_same_moment(machine):
    machine.call_s = 0.0
    recorder = Recorder(0, CudaTimer("cuda:0"))
    for _ in range(3):
        with recorder.region("data"):
            pass
        work(recorder, machine, "forward", 0.1)
    kinds = [span.kind for span in Trace.merge([recorder.spans()]).spans]
    assert kinds == ["data", "forward"] * 3


def test_what_is_left_of_a_cut_region_at_one_moment_is_no_span(machine):
    machine.call_s = 0.0
    timer = CudaTimer("cuda:0")
    recorder = Recorder(0, timer)
    with recorder.region("share_reduce"):
        start = timer.mark()
        machine.stream().work(0.1)
        recorder.transfer(start, timer.mark(), 8, 1)
    assert [(span.kind, span.num_bytes) for span in recorder.spans()] == [("share_reduce", 8)]


def test_a_clock_that_cannot_be_compared_is_left_alone(machine):
    recorder = Recorder(0, CudaTimer("cuda:0"))
    machine.drift[0] = 0.5
    machine.pass_s(100)
    assert recorder.timer.rate() == 1.0


@pytest.mark.parametrize("last", [0, 1])
def test_work_on_several_gpus_lasts_until_the_last_of_them_has_ended(machine, last):
    recorder = Recorder(0, JointTimer([CudaTimer("cuda:0"), CudaTimer("cuda:1")]))
    first, second = machine.stream(1 - last), machine.stream(last)
    for kind in ("forward", "backward"):
        with recorder.region(kind):
            first.work(0.1)
            second.wait_stream(first)
            second.work(0.4)
    forward, backward = recorder.spans()
    assert forward.duration_s == pytest.approx(0.5, rel=1e-3)
    # The first GPU begins at once with its part, and the second one is the last to end.
    assert backward.duration_s == pytest.approx(0.4, rel=1e-3)
    assert backward.start_s == pytest.approx(forward.end_s, abs=1e-4)
