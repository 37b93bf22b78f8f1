"""Which part of a transfer between GPUs was waiting."""

from labkit.tracing import Span
from labkit.tracing.recorder import with_waits


def on_edge(rank, kind, start_s, end_s, *meets, num_bytes=0):
    return Span(rank, kind, start_s, end_s, num_bytes, None, 0, meets)


def kinds_of(spans):
    return [(s.rank, s.kind, round(s.start_s, 6), round(s.end_s, 6), s.peer) for s in spans]


def test_a_send_that_ended_before_its_receive_has_waited_for_nobody():
    message = 0, 1, 1
    sent = on_edge(0, "communicate", 1.0, 1.1, message, num_bytes=8)
    received = on_edge(1, "communicate", 2.0, 2.1, message)
    assert kinds_of(with_waits([[sent], [received]])) == [
        (0, "communicate", 1.0, 1.1, None),
        (1, "communicate", 2.0, 2.1, None),
    ]


def test_clocks_that_differ_a_little_do_not_hide_a_wait():
    message = 0, 1, 1
    sent = on_edge(0, "communicate", 1.0, 2.0, message, num_bytes=8)
    received = on_edge(1, "communicate", 2.00002, 2.00003, message)
    told = kinds_of(with_waits([[sent], [received]]))
    assert told[:2] == [(0, "wait", 1.0, 2.0, 1), (0, "communicate", 2.0, 2.0, None)]


def test_a_receive_waits_for_its_sender_and_a_meeting_for_the_last_rank():
    first = on_edge(0, "communicate", 1.0, 1.1, (0, 1, 1), num_bytes=8)
    again = on_edge(0, "communicate", 3.0, 3.1, (0, 1, 2), num_bytes=8)
    early = on_edge(1, "communicate", 0.2, 1.1, (0, 1, 1))
    late = on_edge(1, "communicate", 3.05, 3.1, (0, 1, 2))
    assert kinds_of(with_waits([[first, again], [early, late]]))[2:] == [
        (0, "communicate", 3.05, 3.1, None),
        (1, "wait", 0.2, 1.0, 0),
        (1, "communicate", 1.0, 1.1, None),
        (1, "communicate", 3.05, 3.1, None),
    ]
    ring = [[on_edge(r, "share", float(r), 4.0, (-1, -1, 7))] for r in range(3)]
    assert kinds_of(with_waits(ring)) == [
        (0, "wait", 0.0, 2.0, 2),
        (0, "share", 2.0, 4.0, None),
        (1, "wait", 1.0, 2.0, 2),
        (1, "share", 2.0, 4.0, None),
        (2, "share", 2.0, 4.0, None),
    ]
