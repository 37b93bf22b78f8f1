"""What a cell shows while ranks run, with a board and a trace that are written by hand."""

import re
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest

from labkit.engine.comm.board import Board
from labkit.engine.runtime import output
from labkit.engine.tracing import Span, Trace
from workbook.notebook import live
from workbook.notebook.lane_picture import draw
from workbook.notebook.lanes import History

EDGES_S = np.linspace(0.0, 4.0, 5)
NOW_S = 1000.0


@pytest.fixture(autouse=True)
def _clock_that_stands_still(monkeypatch):
    monkeypatch.setattr(live, "time", SimpleNamespace(perf_counter=lambda: NOW_S))


class Cell:
    """Keeps what is shown."""

    is_cell = True

    def __init__(self):
        self.pages = []

    def show(self, page, text):
        self.pages.append(page)


def board_of(world_size, since_s, kinds=("compute", "wait")):
    """A board of ranks that have spent ``since_s``, in equal parts."""
    board = Board(world_size)
    board.ranks["origin_s"] = NOW_S - since_s
    for place, kind in enumerate(kinds):
        board.ranks["kinds"][:, place] = kind.encode()
        board.ranks["kind_s"][:, 0, place] = since_s / len(kinds)
    board.ranks["until_s"][:, 0] = since_s
    return board


def words_of(page):
    picture = ElementTree.fromstring(re.search(r"<svg.*</svg>", page)[0])
    return " | ".join(picture.itertext())


def lane_at(board, now_s):
    history = History(board)
    history.read(now_s)
    (lane,) = history.lanes([0], EDGES_S)
    return lane


def test_a_slot_has_the_share_of_each_kind():
    board = board_of(1, 0.0)
    history = History(board)
    for now_s in np.linspace(0, 4, 41):
        wait_s = np.interp(now_s, [0, 1, 2, 4], [0, 0, 1, 2])
        board.ranks["kind_s"][0, 0, :2] = now_s - wait_s, wait_s
        board.ranks["until_s"][0, 0] = now_s
        history.read(now_s)
    (lane,) = history.lanes([0], EDGES_S)
    np.testing.assert_allclose(lane["compute"], [1, 0, 0.5, 0.5], atol=1e-6)
    np.testing.assert_allclose(lane["wait"], [0, 1, 0.5, 0.5], atol=1e-6)


def test_what_has_not_ended_is_drawn_up_to_now_and_a_transfer_as_waiting():
    board = board_of(1, 1.0, ("compute",))
    board.ranks["begun"][0, 0] = 1
    np.testing.assert_allclose(lane_at(board, 3.0)["compute"], [1, 1, 1, 0])
    board.ranks["op"] = b"recv"
    np.testing.assert_allclose(lane_at(board, 2.0)["wait"], [0, 1, 0, 0])
    board.ranks["until_s"][0, 1] = 0.5  # it may be that of another thread
    np.testing.assert_allclose(lane_at(board, 2.0)["compute"], [1, 1, 0, 0])


def test_what_ranks_have_written_is_no_markup():
    page = draw([{"<b>": np.ones(4)}], 1.0, "<i>&", ["<u>"], None, "x")
    assert {"<i>&", "<u>", "<b>"} <= set(ElementTree.fromstring(page).itertext())


@pytest.fixture
def cell():
    return Cell()


def drawn(board, cell):
    run = live.LiveRun(board, cell)
    run.update()
    return run


def test_lanes_losses_rates_and_the_bar_of_the_slowest_rank(cell):
    board = board_of(2, 2.0)
    run = drawn(board, cell)
    board.progress(0, 6, 10, "steps, epoch 1", samples=100)
    board.progress(1, 4, 10, "steps, epoch 1", samples=100)
    board.ranks["loss"] = 0.25, 0
    board.ranks["origin_s"] -= 1
    run.update()
    words = words_of(cell.pages[-1])
    assert "4 of 10 steps, epoch 1" in words
    assert "loss 0.25, " in words
    assert (words.count("loss"), words.count("samples/s")) == (1, 2)
    assert 'role="img" aria-label="Live timeline of 2 ranks"' in cell.pages[-1]
    assert "aria-live" not in cell.pages[-1]
    for _ in range(50):
        board.ranks["origin_s"] -= 0.02
        run.update()
    assert len(cell.pages) == 4, "three times a second"


def test_it_ends_as_the_timeline_of_the_trace_or_as_it_was(cell):
    spans = [Span(r, "compute", 0, 2 - r) for r in range(2)] + [Span(1, "wait", 1, 2)]
    drawn(board_of(2, 2.0), cell).close(Trace.merge([spans]))
    assert 'alt="Timeline of 2 ranks over 2 s.' in cell.pages[-1]
    assert "<figcaption" in cell.pages[-1]
    drawn(board_of(2, 2.0), cell).close(None)
    assert "2 ranks, 2.0 s, stopped" in words_of(cell.pages[-1])


def test_a_run_without_spans_has_no_empty_lanes(cell):
    drawn(board_of(1, 2.0, ()), cell)
    assert cell.pages == ["<div>1 rank, 2.0 s</div>"]


class Shell:
    """What a kernel's shell knows of the cell that runs, and what is sent to it."""

    kernel = True

    def __init__(self):
        self.header = {"msg_id": "1", "msg_type": "execute_request"}
        self.display_pub, self.sent = self, []

    def get_parent(self):
        return {"header": self.header}

    def publish(self, data, metadata, transient, update):
        self.sent.append((transient["display_id"], update))


def test_runs_of_one_cell_share_a_place_and_a_buttons_callback_has_none(monkeypatch):
    def draw_one():
        run = output.Watcher(board_of(1, 2.0))
        run.update()
        run.close(None)

    shell = Shell()
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    draw_one()
    output.Watcher(board_of(1, 0.1)).close(None)  # too short to be drawn
    draw_one()
    first, *later = shell.sent
    assert not first[1]
    assert later == [(first[0], True)] * 3
    shell.header["msg_id"] = "2"
    draw_one()
    assert shell.sent[4][0] != first[0]
    assert not shell.sent[4][1]
    with output.undrawn():
        draw_one()
    shell.header["msg_type"] = "comm_msg"
    draw_one()
    monkeypatch.setenv("LABKIT_LIVE", "0")  # where outputs are compared
    draw_one()
    assert len(shell.sent) == 6
