"""Times of GPU work, on pretended GPUs: what the order and the streams make of events.

Real GPUs: tests/gpu.
"""

import fake_cuda
import pytest

from labkit.tracing import CudaTimer, Recorder


@pytest.fixture
def machine(monkeypatch):
    return fake_cuda.install(monkeypatch)


def work(recorder, machine, kind, seconds, device="cuda:0"):
    with recorder.region(kind):
        machine.stream(device).work(seconds)


@pytest.mark.parametrize("late_s", [0, 36_000])
def test_a_span_is_as_long_as_its_work_however_long_the_run_is(machine, late_s):
    recorder = Recorder(0, CudaTimer("cuda:0"))
    machine.pass_s(late_s)
    work(recorder, machine, "compute", 0.5)
    machine.pass_s(1.0)
    for _ in range(50):
        work(recorder, machine, "update", 1e-4)
        machine.pass_s(3e-3)
    spans = recorder.spans()
    assert spans[0].start_s == pytest.approx(late_s, abs=1e-3)
    # The anchor is the event before: what comes after a long pause is exact.
    assert [span.duration_s for span in spans[1:]] == pytest.approx([1e-4] * 50, abs=2e-6)


def test_work_on_several_gpus_lasts_until_the_last_of_them_has_ended(machine):
    recorder = Recorder(0, CudaTimer("cuda:0", "cuda:1"))
    first, second = machine.stream(1), machine.stream(0)
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
