"""The longest chain of messages in the calls of comm."""

import pytest

from workbook.exercises.grader.critical_path import (
    longest_wait,
    seconds_in_a_row,
    steps_in_a_row,
)


def ring(sends_first):
    """Three steps of four ranks; by rank, ``sends_first`` or None for an exchange."""

    def calls(rank):
        right, left = (rank + 1) % 4, (rank - 1) % 4
        if sends_first is None:
            return [("exchange", right, left, 0)] * 3
        pair = [("send", right, None, 0), ("recv", None, left, 0)]
        return (pair if sends_first(rank) else pair[::-1]) * 3

    return [calls(rank) for rank in range(4)]


@pytest.mark.parametrize(
    ("sends_first", "steps"), [(None, 3), (lambda r: r % 2 == 0, 6), (lambda r: r == 0, 12)]
)
def test_an_exchange_takes_one_step_and_a_queue_one_per_rank(sends_first, steps):
    assert steps_in_a_row(ring(sends_first)) == steps


@pytest.mark.parametrize(("segments", "num_bytes", "seconds"), [(1, 1000, 3.0), (4, 250, 3.75)])
def test_on_a_link_a_message_takes_its_latency_and_its_bytes(segments, num_bytes, seconds):
    passes = [("exchange", 2, 0, num_bytes)] * (segments - 1)
    chain = [
        [("send", 1, None, num_bytes)] * segments,
        [("recv", None, 0, 0), *passes, ("send", 2, None, num_bytes)],
        [("recv", None, 1, 0)] * segments,
    ]
    assert seconds_in_a_row(chain, 0.5, 1000) == pytest.approx(seconds)


@pytest.mark.parametrize("calls", [[[("recv_any", None, None)]], [[("send", 1, None)], []]])
def test_what_cannot_be_told_is_not(calls):
    assert steps_in_a_row(calls) is None


def test_the_last_of_those_that_a_root_tells_one_by_one_waits_longest():
    root = [("send", peer, None, 0) for peer in (1, 2, 3)]
    calls = [root, *([("recv", None, 0, 0)] for _ in range(3))]
    assert longest_wait(calls, 1.0, 1000) == (3, 0, 2.0, 1)
    assert longest_wait(ring(None), 1.0, 1000) is None, "nobody waits in a ring of exchanges"
    assert longest_wait([[("recv_any", None, None)]], 1.0, 1000) is None
