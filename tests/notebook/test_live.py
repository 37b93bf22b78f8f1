"""What a cell shows while ranks run, with a board and a trace that are written by hand."""

import re
import time
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from labkit.comm.board import Board
from labkit.runtime import output
from labkit.tracing import Span, Trace
from workbook.notebook import live
from workbook.notebook.lane_picture import draw
from workbook.notebook.lanes import History
from workbook.notebook.live import LiveRun

EDGES_S = np.linspace(0.0, 4.0, 5)


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
    board.ranks["origin_s"] = time.perf_counter() - since_s
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


class TestLiveRun:
    def test_a_run_under_a_second_shows_nothing(self):
        cell = Cell()
        run = LiveRun(board_of(2, 0.5), cell)
        run.update()
        run.close(Trace((Span(0, "compute", 0, 0.5),)))
        assert cell.pages == []

    def test_lanes_losses_rates_and_the_bar_of_the_slowest_rank(self):
        board, cell = board_of(2, 2.0), Cell()
        run = LiveRun(board, cell)
        run.update()
        board.progress(0, 6, 10, "steps, epoch 1", samples=100)
        board.progress(1, 4, 10, "steps, epoch 1", samples=100)
        board.ranks["loss"] = 0.25, 0
        board.ranks["origin_s"] -= 1
        run.update()
        words = words_of(cell.pages[-1])
        assert "4 of 10 steps, epoch 1" in words
        assert words.count("loss") == 1
        assert "loss 0.25, " in words
        assert words.count("samples/s") == 2
        assert 'role="img" aria-label="Live timeline of 2 ranks"' in cell.pages[-1]
        assert "aria-live" not in cell.pages[-1]

    def test_it_is_drawn_a_few_times_a_second(self):
        board, cell = board_of(2, 2.0), Cell()
        run = LiveRun(board, cell)
        for _ in range(50):
            run.update()
            board.ranks["origin_s"] -= 0.02
        assert 2 <= len(cell.pages) <= 4

    def test_it_ends_as_the_timeline_of_the_trace(self):
        cell = Cell()
        run = LiveRun(board_of(2, 2.0), cell)
        run.update()
        spans = [Span(r, "compute", 0, 2 - r) for r in range(2)] + [Span(1, "wait", 1, 2)]
        run.close(Trace.merge([spans]))
        assert 'alt="Timeline of 2 ranks over 2 s.' in cell.pages[-1]
        assert "<figcaption" in cell.pages[-1]

    def test_after_a_failure_the_lanes_stay_and_say_so(self):
        cell = Cell()
        run = LiveRun(board_of(2, 2.0), cell)
        run.update()
        run.close(None)
        assert "2 ranks, 2.0 s, stopped" in words_of(cell.pages[-1])

    def test_more_ranks_than_lanes(self):
        cell = Cell()
        run = LiveRun(board_of(64, 2.0), cell)
        run.update()
        assert "64 ranks, 2.0 s, of which 16 are drawn" in words_of(cell.pages[-1])


class TestWhere:
    class Shell:
        kernel = True

        def __init__(self, message="1", kind="execute_request"):
            self.header = {"msg_id": message, "msg_type": kind}
            self.display_pub, self.sent = self, []

        def get_parent(self):
            return {"header": self.header}

        def publish(self, data, metadata, transient, update):
            self.sent.append((transient["display_id"], update))

    @pytest.fixture
    def shell(self, monkeypatch):
        import IPython

        shell = self.Shell()
        monkeypatch.setattr(IPython, "get_ipython", lambda: shell)
        monkeypatch.setenv("LABKIT_LIVE", "1")
        return shell

    def draw_one(self):
        run = live.watcher(board_of(1, 2.0))
        run.update()
        run.close(None)

    def test_runs_of_one_cell_share_a_place_and_the_next_cell_has_its_own(self, shell):
        self.draw_one()
        live.watcher(board_of(1, 0.1)).close(None)  # too short to be drawn
        self.draw_one()
        first, *later = shell.sent
        assert not first[1]
        assert later == [(first[0], True)] * 3
        shell.header["msg_id"] = "2"
        self.draw_one()
        assert shell.sent[4][0] != first[0]
        assert not shell.sent[4][1]

    def test_a_buttons_callback_has_no_cell(self, shell):
        shell.header["msg_type"] = "comm_msg"
        self.draw_one()
        assert shell.sent == []

    @pytest.mark.parametrize("drawn", [True, False])
    def test_nothing_is_drawn_where_outputs_are_compared(self, drawn, shell, monkeypatch):
        monkeypatch.setenv("LABKIT_LIVE", str(int(drawn)))
        assert output.kernel() is shell
        assert (output.Watcher(Board(1)).drawn is not None) == drawn
        with output.undrawn():
            assert output.Watcher(Board(1)).drawn is None
