"""Spans as they are recorded, by a timer that the test sets and in a real run."""

import threading

from labkit.engine.tracing import Recorder, Span, Trace
from labkit.engine.tracing.recorder import with_waits


class Steps:
    """A timer whose time is set by the test."""

    def __init__(self):
        self.now = 0.0

    def mark(self):
        return self.now

    def seconds(self, mark, origin):
        return mark - origin

    def is_past(self, mark):
        return True


def test_regions_and_transfers_do_not_overlap():
    timer = Steps()
    recorder = Recorder(3, timer)

    def beside():
        with recorder.region("all_reduce"):
            timer.now = 9.0

    with recorder.region("compute"):
        timer.now = 5.0
        recorder.transfer(2.0, 4.0, 100, peer=1)
        with recorder.region("share_reduce"):
            timer.now = 8.0
            # A transfer inside a phase carries its name, and waiting is apart.
            recorder.transfer(5.0, 8.0, 8, peer=1, arrived=7.0)
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        timer.now = 10.0
    trace = Trace.merge([recorder.spans()])
    assert [(s.kind, s.start_s, s.end_s, s.num_bytes) for s in trace.of(3, lane=0)] == [
        ("compute", 0.0, 2.0, 0),
        ("communicate", 2.0, 4.0, 100),
        ("compute", 4.0, 5.0, 0),
        ("wait", 5.0, 7.0, 0),
        ("share_reduce", 7.0, 8.0, 8),
        ("compute", 8.0, 10.0, 0),
    ]
    # A thread has a lane of its own, and the main one is not cut.
    assert [(s.kind, s.lane) for s in trace.spans if s.lane] == [("all_reduce", 1)]
    assert trace.seconds_by_kind(lane=0)["compute"] == 5.0
    assert trace.between(1.0, 3.0).seconds_by_kind() == {"compute": 1.0, "communicate": 1.0}


def waits(*spans):
    """(rank, kind, start, end, meets) -> what is told after the run."""
    made = [Span(rank, kind, a, b, 8, None, 0, (meets,)) for rank, kind, a, b, meets in spans]
    return [(s.rank, s.kind, s.start_s, s.end_s, s.peer) for s in with_waits([made])]


def test_between_gpus_the_last_one_to_come_is_waited_for():
    assert waits((0, "push", 1.0, 1.1, (0, 1, 1)), (1, "push", 0.2, 1.1, (0, 1, 1))) == [
        (0, "push", 1.0, 1.1, None),
        (1, "wait", 0.2, 1.0, 0),
        (1, "push", 1.0, 1.1, None),
    ]
    assert waits(*((r, "share", float(r), 4.0, (-1, -1, 7)) for r in range(2))) == [
        (0, "wait", 0.0, 1.0, 1),
        (0, "share", 1.0, 4.0, None),
        (1, "share", 1.0, 4.0, None),
    ]
    # A send that ended before its receive has waited for nobody: the message fitted into buffers.
    buffered = (0, "push", 1.0, 1.1, (0, 1, 1)), (1, "push", 2.0, 2.1, (0, 1, 1))
    assert [kind for _, kind, *_ in waits(*buffered)] == ["push", "push"]
