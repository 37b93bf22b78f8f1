"""What the caller sees of the ranks' output and progress, without any rank."""

import os
from multiprocessing import Pipe

import pytest

from labkit.comm.board import Board
from labkit.runtime.output import Output
from labkit.runtime.progress import ProgressBar


@pytest.fixture
def pipes():
    ends = [Pipe(duplex=False) for _ in range(3)]
    output = Output([receiver for receiver, _ in ends])

    def say(rank, text):
        os.write(ends[rank][1].fileno(), text.encode())
        output.read(ends[rank][0])

    yield output, say
    output.close()
    for _, sender in ends:
        sender.close()


def test_rank_0_is_shown_at_once_and_others_wait_for_the_ranks_below(pipes, capsys):
    output, say = pipes
    say(1, "one\n")
    say(0, "zero\n")
    output.show(finished=set())
    assert capsys.readouterr().out == "[rank 0] zero\n"
    output.show(finished={0})
    assert capsys.readouterr().out == "[rank 1] one\n"


def test_lines_are_held_for_a_while_only(pipes, capsys, monkeypatch):
    output, say = pipes
    say(2, "two\n")
    output.show(finished=set())
    assert capsys.readouterr().out == ""
    monkeypatch.setattr("labkit.runtime.output._HOLD_S", 0.0)
    output.show(finished=set())
    assert capsys.readouterr().out == "[rank 2] two\n"


def test_under_test_what_is_shown_does_not_depend_on_time(pipes, capsys, monkeypatch):
    output, say = pipes
    monkeypatch.setenv("LABKIT_LIVE", "0")
    monkeypatch.setattr("labkit.runtime.output._HOLD_S", 0.0)
    say(2, "two\n")
    output.show(finished={0, 1})
    assert capsys.readouterr().out == ""
    output.flush()
    assert capsys.readouterr().out == "[rank 2] two\n"


def test_a_line_that_comes_in_pieces_is_one_line(pipes, capsys):
    output, say = pipes
    for piece in ("a", "b\nc", "d\n"):
        say(0, piece)
    output.flush()
    assert capsys.readouterr().out == "[rank 0] ab\n[rank 0] cd\n"


def test_the_bar_shows_the_slowest_rank(monkeypatch):
    monkeypatch.setattr("labkit.runtime.progress._BAR_AFTER_S", 0.0)
    board = Board(2)
    drawn = []
    bar = ProgressBar(board)
    monkeypatch.setattr(bar, "_draw", lambda *what: drawn.append(what))
    bar.update()
    board.progress(0, 6, 10, "steps")
    board.progress(1, 4, 10, "steps")
    bar.update()
    assert drawn == [(4, 10, "steps")]
