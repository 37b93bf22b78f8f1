"""The sums on the board are those of the trace."""

import threading

import pytest

from labkit.comm.board import KINDS, Board
from labkit.comm.session import SpanSums
from labkit.tracing import ClockTimer, Recorder


def recorder_on(board, timer=None):
    recorder = Recorder(1, timer)
    recorder.listener = SpanSums(board.ranks[1])
    return recorder


def sums_of(board, lane=0):
    row = board.ranks[1]
    return {kind.decode(): float(s) for kind, s in zip(row["kinds"], row["kind_s"][lane]) if kind}


def test_they_are_the_seconds_by_kind_of_the_trace():
    board = Board(2)
    recorder = recorder_on(board)
    for _ in range(5):
        with recorder.region("compute"), recorder.region("data"):
            start = recorder.timer.mark()
            recorder.transfer(start, recorder.timer.mark(), 8, 0)
    spans = recorder.spans()
    for kind, seconds in sums_of(board).items():
        expected = sum(span.duration_s for span in spans if span.kind == kind)
        assert seconds == pytest.approx(expected)
    assert board.ranks[1]["until_s"][0] == pytest.approx(max(span.end_s for span in spans))
    assert not board.ranks[0]["kind_s"].any()


def test_the_region_that_goes_on_is_known():
    board = Board(2)
    recorder = recorder_on(board)
    begun = board.ranks[1]["begun"]
    with recorder.region("compute"):
        assert begun[0] == 1
        with recorder.region("update"):
            assert begun[0] == 2
        assert begun[0] == 1
    assert begun[0] == 0


def test_other_threads_share_the_second_lane():
    board = Board(2)
    recorder = recorder_on(board)

    def work():
        with recorder.region("communicate"):
            pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums_of(board)["communicate"] == 0
    assert sums_of(board, lane=1)["communicate"] > 0


def test_more_kinds_than_there_is_room_for_share_the_last_place():
    board = Board(2)
    recorder = recorder_on(board)
    for number in range(KINDS + 5):
        with recorder.region(f"kind {number}"):
            pass
    total = sum(span.duration_s for span in recorder.spans())
    assert sum(sums_of(board).values()) == pytest.approx(total)


def test_what_a_gpu_has_not_reached_yet_is_added_later():
    class Late(ClockTimer):
        is_over = False

        def is_past(self, mark):
            return self.is_over

    board, timer = Board(2), Late()
    recorder = recorder_on(board, timer)
    with recorder.region("compute"):
        pass
    assert not board.ranks[1]["kind_s"].any()
    timer.is_over = True
    with recorder.region("update"):
        pass
    assert sums_of(board).keys() == {"compute", "update"}
