"""The score of a puzzle, and the scoreboard of a session."""

import numpy as np
import pytest
import torch
from answers.puzzles import by_doubling
from ranks import travel_by_value
from workbook.exercises.grader.score import Score, praise_score, scored

from workbook import check
from workbook.exercises import puzzles
from workbook.exercises.grader.exercise import Case, Outcome
from workbook.exercises.grader.held_memory import HeldBytes

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
    score = Score(
        lambda case, ranks: case.size, lambda case: 4, lambda n: f"{n} pebbles", "a book"
    )
    ranks = (Outcome(None, None, 0, 0, 0, {}),) * 2

    def said(size):
        found = scored(score, {Case(2, size): ranks})
        return praise_score(score, 2, found)

    assert said(4) == "4 pebbles on 2 ranks: as good as the best known (a book)."
    assert said(3) == "3 pebbles on 2 ranks: less than the best that this page knows, 4 pebbles!"


def to_all(comm, tensor):
    for rank in range(1, comm.world_size):
        if comm.rank == 0:
            comm.send(tensor, rank)
        elif comm.rank == rank:
            comm.recv(tensor, 0)
    return tensor


@pytest.mark.slow
def test_the_scoreboard_keeps_the_best_of_the_session(monkeypatch, capsys):
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
    assert "rank 0 is in all messages" in capsys.readouterr().out
