"""The score of a puzzle, and the scoreboard of a session."""

import pytest
from answers.puzzles import by_doubling
from ranks import travel_by_value

from workbook import check
from workbook.exercises import puzzles

travel_by_value(__name__)


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
