"""The score of a puzzle, and the scoreboard of a session."""

import numpy as np
import pytest
import torch
from answers.puzzles import by_doubling
from ranks import travel_by_value

from workbook import check
from workbook.exercises import puzzles
from workbook.exercises.grader.exercise import Score
from workbook.exercises.grader.held_memory import HeldBytes
from workbook.exercises.grader.judge_traffic import Scored

travel_by_value(__name__)

MIB = 2**20


@pytest.mark.parametrize("make", [torch.empty, lambda n: np.empty(n, dtype=np.float32)])
def test_the_most_that_tensors_and_arrays_hold_at_one_time(make):
    with HeldBytes() as held:
        for _ in range(3):
            one = make(MIB // 4)
            del one
    assert held.num_bytes == pytest.approx(MIB, rel=0.05)


def test_small_objects_are_not_counted():
    with HeldBytes() as held:
        torch.zeros(10).tolist()
    assert held.num_bytes == 40


def test_a_score_may_be_better_than_the_best_known():
    score = Score(None, None, str, "a book")
    assert "as good as the best known (a book)" in Scored(4, 4, "4", "4").praise(score, 2)
    assert "less than the best" in Scored(3, 4, "3", "4").praise(score, 2)


def to_all(comm, tensor):
    for rank in range(1, comm.world_size):
        if comm.rank == 0:
            comm.send(tensor, rank)
        elif comm.rank == rank:
            comm.recv(tensor, 0)
    return tensor


@pytest.mark.slow
def test_the_scoreboard_keeps_the_best_of_the_session(monkeypatch):
    monkeypatch.setattr(puzzles, "_TRIED", {})

    def row():
        return puzzles.scoreboard().rows[5]

    assert row() == ["broadcast", "-", "-", "not attempted yet"]
    check.puzzles.broadcast(to_all, world_sizes=(4,))
    assert row() == ["broadcast", "3 rounds", "2 rounds", "right, and not the best yet"]
    for fn in (by_doubling, to_all, lambda comm, tensor: None):
        check.puzzles.broadcast(fn, world_sizes=(4,))
        assert row() == ["broadcast", "2 rounds", "2 rounds", "passed"]
    assert len(puzzles.scoreboard().rows) == 11
