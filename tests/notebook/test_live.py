"""What a cell shows while ranks run, with a board and a trace that are written by hand."""

import base64
import re
import time
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from labkit.comm.board import Board
from labkit.runtime import output
from labkit.tracing import Span, Trace
from workbook.notebook import live
from workbook.notebook.lane_picture import MOST_LANES, THEMED, Picture, draw, num_slots
from workbook.notebook.lanes import History, Lane, trace_lanes
from workbook.notebook.live import LiveRun

MOST_BYTES = 20_000
EDGES_S = np.linspace(0.0, 4.0, 5)


class Cell:
    """Keeps what is shown."""

    is_cell = True

    def __init__(self):
        self.pages = []

    def show(self, page, text):
        self.pages.append(page)

    def leave(self):
        pass


def board_of(world_size, since_s, kinds=("compute", "wait")):
    """A board of ranks that have spent ``since_s``, in equal parts."""
    board = Board(world_size)
    board.ranks["origin_s"] = time.perf_counter() - since_s
    for place, kind in enumerate(kinds):
        board.ranks["kinds"][:, place] = kind.encode()
        board.ranks["kind_s"][:, 0, place] = since_s / len(kinds)
    board.ranks["until_s"][:, 0] = since_s
    return board


def picture_of(page):
    """The SVG in a page, drawn live or as an image."""
    if found := re.search(r"base64,([^\"]+)", page):
        return ElementTree.fromstring(base64.b64decode(found[1]))
    return ElementTree.fromstring(re.search(r"<svg.*</svg>", page)[0])


def words_of(page):
    return " | ".join(picture_of(page).itertext())


class TestLanes:
    def test_a_slot_has_the_share_of_each_kind(self):
        board = board_of(1, 0.0)
        history = History(board)
        for now_s, compute_s, wait_s in [(1, 1, 0), (2, 1, 1), (4, 2, 2)]:
            board.ranks["kind_s"][0, 0, :2] = compute_s, wait_s
            board.ranks["until_s"][0, 0] = now_s
            history.read(now_s)
        (lane,) = history.lanes([0], EDGES_S)
        np.testing.assert_allclose(lane.shares["compute"], [1, 0, 0.5, 0.5])
        np.testing.assert_allclose(lane.shares["wait"], [0, 1, 0.5, 0.5])

    def test_a_span_that_has_not_ended_is_drawn_up_to_now(self):
        board = board_of(1, 1.0, ("compute",))
        board.ranks["begun"][0, 0] = 1
        history = History(board)
        history.read(3.0)
        (lane,) = history.lanes([0], EDGES_S)
        np.testing.assert_allclose(lane.shares["compute"], [1, 1, 1, 0])

    def test_a_transfer_that_has_not_ended_is_waiting(self):
        board = board_of(1, 1.0, ("compute",))
        board.ranks["op"] = b"recv"
        history = History(board)
        history.read(2.0)
        (lane,) = history.lanes([0], EDGES_S)
        np.testing.assert_allclose(lane.shares["wait"], [0, 1, 0, 0])

    def test_another_threads_transfer_is_not_the_main_threads_waiting(self):
        board = board_of(1, 1.0, ("compute",))
        board.ranks["until_s"][0, 1] = 0.5
        board.ranks["op"], board.ranks["begun"][0, 0] = b"recv", 1
        history = History(board)
        history.read(2.0)
        (lane,) = history.lanes([0], EDGES_S)
        assert "wait" not in lane.shares
        np.testing.assert_allclose(lane.shares["compute"], [1, 1, 0, 0])

    def test_many_readings_are_thinned_out(self):
        board, history = board_of(1, 0.0, ("compute",)), None
        history = History(board)
        for step in range(1, 4001):
            board.ranks["kind_s"][0, 0, 0] = board.ranks["until_s"][0, 0] = step / 1000
            history.read(step / 1000)
        assert len(history._readings) < 300
        (lane,) = history.lanes([0], EDGES_S)
        np.testing.assert_allclose(lane.shares["compute"], 1, atol=1e-6)

    def test_those_of_a_trace_are_the_spans(self):
        spans = [Span(0, "compute", 0, 1), Span(0, "wait", 1, 1.5), Span(0, "compute", 1.5, 4)]
        spans += [Span(0, "communicate", 0, 1, lane=1), Span(0, "communicate", 0.5, 1, lane=2)]
        (lane,) = trace_lanes(Trace.merge([spans]), [0], EDGES_S)
        np.testing.assert_allclose(lane.shares["compute"], [1, 0.5, 1, 1])
        np.testing.assert_allclose(lane.shares["wait"], [0, 0.5, 0, 0])
        np.testing.assert_allclose(lane.beside["communicate"], [1.5, 0, 0, 0])


class TestPicture:
    @pytest.mark.parametrize("world_size", [1, 2, 8, 16, 64])
    def test_the_page_is_small_however_wild_the_lanes(self, world_size):
        noise, lanes = np.random.default_rng(0), []
        kinds = ["compute", "update", "data", "communicate", "wait", "push", "pull", "evaluate"]
        slots = num_slots(min(world_size, MOST_LANES) * (2 * len(kinds) - 3))
        for rank in range(min(world_size, MOST_LANES)):
            parts = noise.dirichlet(np.ones(len(kinds)), slots).T
            lanes.append(Lane(rank, dict(zip(kinds, parts)), dict(zip(kinds[3:], parts))))
        words = ["loss 0.1234, 12,345 samples/s"] * len(lanes)
        page = draw(Picture(lanes, 4.0, "head", words, 0.5), "x", THEMED, "")
        ElementTree.fromstring(page)
        assert len(page) < MOST_BYTES

    def test_what_ranks_have_written_is_no_markup(self):
        lanes = [Lane(0, {"<b>": np.ones(4)})]
        page = draw(Picture(lanes, 1.0, "<i>&", ["<u>"]), "x", THEMED, "")
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
        assert 'role="img" aria-label="Live timeline of 2 ranks, still running"' in cell.pages[-1]
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
        page = cell.pages[-1]
        assert 'alt="Timeline of 2 ranks over 2 s. rank 0: compute' in page
        assert "rank 1: compute 1 s, wait 1 s." in page
        assert "What each rank did: 2 ranks, 2 s" in words_of(page)

    def test_lanes_on_gpus_name_them_below_their_rank(self):
        cell = Cell()
        run = LiveRun(board_of(2, 2.0), cell)
        run.update()
        spans = [Span(rank, "compute", 0, 2) for rank in range(2)]
        run.close(Trace.merge([spans], {0: "cuda:0", 1: "cuda:0"}))
        assert words_of(cell.pages[-1]).count("cuda:0") == 2
        assert "rank 1 · cuda:0: compute 2 s." in cell.pages[-1]
        run.close(Trace.merge([spans], {0: "cpu", 1: "cpu"}))
        assert "cpu" not in words_of(cell.pages[-1])

    def test_after_a_failure_the_lanes_stay_and_say_so(self):
        cell = Cell()
        run = LiveRun(board_of(2, 2.0), cell)
        run.update()
        run.close(None)
        assert "2 ranks, stopped after 2.0 s" in words_of(cell.pages[-1])
        assert len(picture_of(cell.pages[-1]).findall("./{*}path")) == 2

    def test_more_ranks_than_lanes(self):
        cell = Cell()
        run = LiveRun(board_of(64, 2.0), cell)
        run.update()
        assert "64 ranks, 2.0 s, of which 16 are drawn" in words_of(cell.pages[-1])
        assert len(cell.pages[-1]) < MOST_BYTES


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
        monkeypatch.setattr(live, "_place", None)
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
