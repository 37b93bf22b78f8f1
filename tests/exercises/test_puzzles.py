"""The scoreboard of a session."""

import pytest
from answers.puzzles import by_doubling

from workbook import check
from workbook.exercises import puzzles


def to_all(comm, tensor):
    for rank in range(1, comm.world_size):
        if comm.rank == 0:
            comm.send(tensor, rank)
        elif comm.rank == rank:
            comm.recv(tensor, 0)
    return tensor


@pytest.mark.slow
def test_the_scoreboard_keeps_the_best_of_the_session(monkeypatch, capsys):
    monkeypatch.setattr(puzzles, "_SCORES", {})
    check.puzzles.broadcast(to_all, world_sizes=(4,))
    for fn, best in ((None, 3), (by_doubling, 2), (to_all, 2), (lambda comm, tensor: None, 2)):
        if fn:
            verdict = check.puzzles.broadcast(fn, world_sizes=(4,))
            # A pass has a score, too; a wrong result has none.
            assert ("score" in verdict.rows) == ("wrong" not in verdict.rows["values"])
        capsys.readouterr()
        puzzles.scoreboard()
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["3", "broadcast", str(best), "rounds", "2", "rounds"] in rows
        assert ["8", "all_reduce", "-", "-"] in rows
