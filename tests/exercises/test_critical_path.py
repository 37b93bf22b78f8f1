"""The longest chain of messages in the calls of comm."""

import pytest

from workbook.exercises.grader.critical_path import seconds_in_a_row, steps_in_a_row


def exchanges(rank, P, steps):
    return [("exchange", (rank + 1) % P, (rank - 1) % P, 0)] * steps


def one_way(rank, P, steps, sends_first):
    calls = [("send", (rank + 1) % P, None, 0), ("recv", None, (rank - 1) % P, 0)]
    return (calls if sends_first else calls[::-1]) * steps


def test_an_exchange_takes_one_step():
    assert steps_in_a_row([exchanges(rank, 4, 3) for rank in range(4)]) == 3


def test_by_parity_a_step_takes_two():
    assert steps_in_a_row([one_way(rank, 4, 3, rank % 2 == 0) for rank in range(4)]) == 6


def test_a_queue_takes_one_step_per_rank():
    assert steps_in_a_row([one_way(rank, 4, 3, rank == 0) for rank in range(4)]) == 12


def chain(segments, num_bytes):
    """Three ranks pass segments on: the one in the middle receives while it sends."""
    passes = [("exchange", 2, 0, num_bytes)] * (segments - 1)
    return [
        [("send", 1, None, num_bytes)] * segments,
        [("recv", None, 0, 0), *passes, ("send", 2, None, num_bytes)],
        [("recv", None, 1, 0)] * segments,
    ]


def test_on_a_link_a_message_takes_its_latency_and_its_bytes():
    assert seconds_in_a_row(chain(1, 1000), 0.5, 1000) == pytest.approx(2 * 1.5)
    assert seconds_in_a_row(chain(4, 250), 0.5, 1000) == pytest.approx(5 * 0.75)
    assert steps_in_a_row(chain(4, 250)) == 5


@pytest.mark.parametrize("calls", [[[("recv_any", None, None)]], [[("send", 1, None)], []]])
def test_what_cannot_be_told_is_not(calls):
    assert steps_in_a_row(calls) is None
