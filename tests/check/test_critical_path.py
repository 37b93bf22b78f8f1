"""The longest chain of messages in the calls of comm."""

import pytest

from labkit.check.grading.critical_path import steps_in_a_row


def exchanges(rank, P, steps):
    return [("exchange", (rank + 1) % P, (rank - 1) % P)] * steps


def one_way(rank, P, steps, sends_first):
    calls = [("send", (rank + 1) % P, None), ("recv", None, (rank - 1) % P)]
    return (calls if sends_first else calls[::-1]) * steps


def test_an_exchange_takes_one_step():
    assert steps_in_a_row([exchanges(rank, 4, 3) for rank in range(4)]) == 3


def test_by_parity_a_step_takes_two():
    assert steps_in_a_row([one_way(rank, 4, 3, rank % 2 == 0) for rank in range(4)]) == 6


def test_a_queue_takes_one_step_per_rank():
    assert steps_in_a_row([one_way(rank, 4, 3, rank == 0) for rank in range(4)]) == 12


@pytest.mark.parametrize("calls", [[[("recv_any", None, None)]], [[("send", 1, None)], []]])
def test_what_cannot_be_told_is_not(calls):
    assert steps_in_a_row(calls) is None
