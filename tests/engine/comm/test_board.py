"""The status board: who waits for whom, worked out from what each rank has posted."""

import threading

import numpy as np
import pytest

from labkit.engine.comm.board import DEPTH, KINDS, LOST, RECV, RETURNED, RUNNING, SEND, Board
from labkit.engine.comm.deadlock import (
    check_collective,
    check_message,
    explain_deadlock,
    find_mismatch,
    stuck_ranks,
    takes_part,
    waits,
)
from labkit.engine.comm.session import SpanSums
from labkit.engine.tracing import Recorder

WHAT = "float32 [2]"


def board_of(world_size):
    board = Board(world_size)
    board.ranks["state"] = RUNNING
    return board


def send(board, rank, dst, what=WHAT):
    board.enter(rank, "send", 0.0, '"a.py", line 1', dst=dst, sent=what)
    check_message(board, SEND, rank, dst)


def recv(board, rank, src, what=WHAT):
    board.enter(rank, "recv", 0.0, '"b.py", line 2', src=src, expected=what)
    check_message(board, RECV, src, rank)


def announce(board, rank, what):
    board.announce(rank, what, "a line")
    check_collective(board, rank)


def test_an_exchange_needs_both_ends():
    board = board_of(3)
    board.enter(0, "exchange", 0.0, "", dst=1, src=2, sent=WHAT, expected=WHAT)
    assert {wait.peer for wait in waits(board, 0)} == {1, 2}
    recv(board, 1, 0)
    assert {wait.peer for wait in waits(board, 0)} == {2}
    board.ranks[2]["state"] = RETURNED
    assert stuck_ranks(board) == [0]


@pytest.mark.parametrize("ahead", range(1, DEPTH + 1))
def test_a_peer_that_runs_ahead_may_be_writing_over_what_is_read(ahead):
    """A send is only queued: its next description is half written, and not counted yet."""
    board = board_of(2)
    for _ in range(ahead):
        send(board, 0, 1)
    board.what[SEND, 0, 1][ahead % DEPTH] = b"another"
    recv(board, 1, 0)


def test_when_the_peer_arrived():
    board = board_of(2)
    board.enter(0, "send", 5.0, "", dst=1, sent=WHAT)
    board.enter(1, "recv", 7.0, "", src=0, expected=WHAT)
    assert board.arrived(0, 1, None) == (7.0, 1)
    assert board.arrived(1, None, 0) == (5.0, 0)
    # The peer may be at its next operation already: the right one is still meant.
    board.leave(0)
    board.enter(0, "send", 9.0, "", dst=1, sent=WHAT)
    assert board.arrived(1, None, 0) == (5.0, 0)


def recv_any(board, rank, sources):
    board.enter_any(rank, sources, '"c.py", line 3')


def test_whoever_receives_from_any_needs_one_of_its_sources():
    board = board_of(4)
    recv_any(board, 0, [1, 2])
    assert [wait.peer for wait in waits(board, 0)] == [1, 2]
    assert [takes_part(board, 0, peer) for peer in range(4)] == [False, True, True, False]
    recv(board, 1, 0)
    assert stuck_ranks(board) == [], "rank 2 may still send"
    send(board, 3, 0)
    assert not board.senders(0, [1, 2]), "rank 3 was not asked"
    send(board, 2, 0)
    assert waits(board, 0) == []


def test_none_of_the_sources_will_come():
    board = board_of(3)
    recv_any(board, 0, [1, 2])
    recv(board, 1, 0)
    board.ranks["state"][2] = RETURNED
    assert stuck_ranks(board) == [0, 1]
    text = explain_deadlock(board, stuck_ranks(board))
    assert "deadlock: rank 0 -> rank 1 -> rank 0" in text
    assert "rank 2 has returned, but rank 0 still waits for it" in text
    wanted = "rank 1 to send or rank 2 to send"
    assert f'rank 0 is in recv_any, waiting for {wanted}, at "c.py", line 3' in text


def test_a_rank_that_is_only_slow_is_no_part_of_a_deadlock():
    board = board_of(3)
    board.enter_joint(0, "barrier", 0.0)
    recv(board, 1, 0)
    assert stuck_ranks(board) == [0, 1]
    text = explain_deadlock(board, stuck_ranks(board))
    assert "deadlock: rank 0 -> rank 1 -> rank 0" in text
    assert "returned" not in text


def test_who_waits_for_a_lost_rank_is_told_and_not_stuck():
    board = board_of(3)
    recv_any(board, 0, [1, 2])
    recv(board, 1, 0)
    recv(board, 2, 0)
    assert stuck_ranks(board) == [0, 1, 2]
    board.ranks["state"][2] = LOST
    assert stuck_ranks(board) == []


def test_the_seconds_by_kind_of_the_live_view_are_those_of_the_trace():
    board, recorder = Board(2), Recorder(1)
    recorder.listener = SpanSums(row := board.ranks[1])

    def in_another_thread():
        with recorder.region("communicate"):
            pass

    with recorder.region("compute"), recorder.region("data"):
        assert row["begun"][0] == 2
        start = recorder.timer.mark()
        recorder.transfer(start, recorder.timer.mark(), 8, 0)
        (thread := threading.Thread(target=in_another_thread)).start()
        thread.join()
    # Any further kinds share the last place.
    for number in range(KINDS):
        with recorder.region(f"kind {number}"):
            pass
    spans = recorder.spans()
    found = {name.decode(): seconds for name, seconds in zip(row["kinds"], row["kind_s"].T)}
    for kind in ("compute", "data", "communicate"):
        lanes = [[s.duration_s for s in spans if (s.kind, s.lane) == (kind, n)] for n in (0, 1)]
        assert found[kind].tolist() == pytest.approx([sum(each) for each in lanes])
    assert row["kind_s"].sum() == pytest.approx(sum(span.duration_s for span in spans))
    assert row["until_s"].max() == pytest.approx(max(span.end_s for span in spans))
    assert row["begun"].tolist() == [0, 0]


# Rows that travel to other hosts


def test_a_board_of_rows_explains_a_deadlock_and_a_mismatch_over_two_hosts():
    one, other = board_of(2), board_of(2)
    recv(one, 0, 1)
    recv(other, 1, 0)
    assert stuck_ranks(one) == stuck_ranks(other) == []
    one.unpack(1, other.pack(1))
    other.unpack(0, one.pack(0))
    assert explain_deadlock(one, stuck_ranks(one)) == explain_deadlock(other, stuck_ranks(other))
    assert stuck_ranks(one) == [0, 1]
    send(sends := board_of(2), 1, 0, "float32 [5]")
    assert find_mismatch(one) == ""
    one.unpack(1, sends.pack(1))
    assert 'sends float32 [5], at "a.py", line 1' in find_mismatch(one)


def test_damage_is_refused_or_harmless_and_clocks_stay_at_home():
    there, random = board_of(4), np.random.default_rng(0)
    for rank in range(4):
        there.ranks[rank]["pid"] = 100
        for other in {*range(4)} - {rank}:
            ends = {"dst": other, "src": other, "sent": WHAT, "expected": WHAT}
            there.enter(rank, "exchange", 7.0, '"a.py", line 3', **ends)
        announce(there, rank, "barrier")
        recv_any(there, rank, [(rank + 1) % 4])
    data = there.pack(2)
    for other in (b"", data[:-1], data + b"x"):
        with pytest.raises(ValueError, match="bytes"):
            Board(4).unpack(2, other)
    (here := Board(4)).unpack(2, data)
    assert here.pack(2) == data
    assert not here.ranks["pid"].any()
    assert not here.posted_s.any()
    assert not here.ranks["op"][[0, 1, 3]].any()
    for _ in range(100):
        damaged = bytearray(data)
        damaged[random.integers(len(data))] = random.integers(256)
        here.unpack(2, bytes(damaged))
        try:
            # What arrived may be wrong, and can be read in every way, or is an error.
            explain_deadlock(here, stuck_ranks(here))
            find_mismatch(here)
        except (IndexError, UnicodeDecodeError):
            continue
