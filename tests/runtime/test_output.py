"""What the caller sees of the ranks' output and progress, without any rank."""

import io
import os
import sys
import time
from multiprocessing import Pipe

import pytest

from labkit.comm.board import Board
from labkit.runtime.output import Output
from labkit.runtime.watch import Nothing, ProgressBar, undrawn, watcher


@pytest.fixture
def pipes():
    ends = [Pipe(duplex=False) for _ in range(3)]
    output = Output([receiver for receiver, _ in ends])

    def say(rank, text):
        os.write(ends[rank][1].fileno(), text.encode())
        output.read([ends[rank][0]])

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


@pytest.mark.slow
@pytest.mark.parametrize("live", [True, False])
def test_lines_are_held_for_two_seconds_or_under_test_until_the_end(
    live, pipes, capsys, monkeypatch
):
    output, say = pipes
    monkeypatch.setenv("LABKIT_LIVE", "1" if live else "0")
    say(2, "two\n")
    output.show(finished=set())
    assert capsys.readouterr().out == ""
    time.sleep(2.1)
    output.show(finished=set())
    assert capsys.readouterr().out == "[rank 2] two\n" * live
    output.flush()
    assert capsys.readouterr().out == "[rank 2] two\n" * (not live)


def test_a_line_that_comes_in_pieces_is_one_line(pipes, capsys):
    output, say = pipes
    for piece in ("a", "b\nc", "d\n"):
        say(0, piece)
    output.flush()
    assert capsys.readouterr().out == "[rank 0] ab\n[rank 0] cd\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "live", "shown"),
    [(Terminal(), "1", True), (Terminal(), "0", False), (io.StringIO(), "1", False)],
    ids=["terminal", "under test", "file"],
)
def test_the_bar_of_a_run_that_takes_a_while_shows_the_slowest_rank(
    stream, live, shown, monkeypatch
):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("LABKIT_LIVE", live)
    board = Board(2)
    bar = ProgressBar(board)
    board.progress(0, 6, 10, "steps")
    board.progress(1, 4, 10, "steps")
    bar.update({})
    assert stream.getvalue() == "", "a short run shows nothing"
    time.sleep(0.5)
    bar.update({})
    assert ("4/10" in stream.getvalue()) == ("steps" in stream.getvalue()) == shown
    board.progress(1, 7, 10, "steps")
    bar.close(None)
    assert ("6/10" in stream.getvalue()) == shown


def test_a_check_draws_nothing_while_its_ranks_run():
    board = Board(2)
    with undrawn():
        assert isinstance(watcher(board), Nothing)
    assert not isinstance(watcher(board), Nothing)
