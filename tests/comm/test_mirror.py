"""The rows of a board as bytes: what arrives, and that damage is refused or harmless."""

import numpy as np
import pytest

from labkit.comm.board import EDGE, RANK, RECV, RUNNING, SEND, Board
from labkit.comm.deadlock import explain_deadlock, find_mismatch, stuck_ranks, waits
from labkit.comm.mirror import pack, unpack


def busy_board() -> Board:
    """A board on which every rank of four has written something everywhere."""
    board = Board(4)
    for rank in range(4):
        slot = board.ranks[rank]
        slot["state"], slot["pid"], slot["origin_s"] = RUNNING, 100 + rank, 5.0
        board.announce(rank, f"ring_all_reduce float32 [{rank}] sum", '"k\u00f6nig.py", line 1')
        for other in {*range(4)} - {rank}:
            ends = (other, "float32 [4]"), (other, "int8 [1]")
            board.enter(rank, "exchange", 7.0, '"a.py", line 3', *ends)
        board.enter_any(rank, [(rank + 1) % 4], '"a.py", line 4')
        board.progress(rank, 3, 10, "steps", samples=4)
        slot["loss"], slot["kind_s"] = 0.25, rank + 0.5
    return board


def test_what_a_rank_has_written_arrives_and_nothing_else_changes():
    there, here = busy_board(), Board(4)
    unpack(here, 2, pack(there, 2))
    for name in set(RANK.names) - {"pid", "origin_s", "meeting_s"}:
        assert np.array_equal(there.ranks[2][name], here.ranks[2][name]), name
    assert np.array_equal(there.wanted[2], here.wanted[2])
    for name in set(EDGE.names) - {"posted_s"}:
        for side, place in ((SEND, np.s_[2]), (RECV, np.s_[:, 2])):
            assert np.array_equal(there.edges[name][side][place], here.edges[name][side][place])
    # Process ids and clocks stay at home.
    assert not here.ranks["pid"].any()
    assert not here.ranks["origin_s"].any()
    assert not here.posted_s.any()
    assert not here.ranks["op"][[0, 1, 3]].any()
    assert not here.counts[SEND, [0, 1, 3]].any()


def test_a_mirrored_board_explains_a_deadlock_and_a_mismatch_over_two_hosts():
    one, other = Board(2), Board(2)
    one.ranks["state"] = other.ranks["state"] = RUNNING
    one.enter(0, "recv", 1.0, '"a.py", line 1', expected=(1, "float32 [4]"))
    other.enter(1, "recv", 1.0, '"a.py", line 2', expected=(0, "float32 [4]"))
    assert stuck_ranks(one) == stuck_ranks(other) == []
    unpack(one, 1, pack(other, 1))
    unpack(other, 0, pack(one, 0))
    assert explain_deadlock(one, stuck_ranks(one)) == explain_deadlock(other, stuck_ranks(other))
    assert stuck_ranks(one) == [0, 1]
    sends = Board(2)
    sends.enter(1, "send", 1.0, '"a.py", line 1', sent=(0, "float32 [5]"))
    assert find_mismatch(one) == ""
    unpack(one, 1, pack(sends, 1))
    assert waits(one, 1) == []
    assert 'sends float32 [5], at "a.py", line 1' in find_mismatch(one)


def test_damage_is_refused_or_harmless():
    there, random = busy_board(), np.random.default_rng(0)
    data = pack(there, 2)
    for other in (b"", data[:-1], data + b"x", data + data):
        with pytest.raises(ValueError, match=r"buffer|unpack"):
            unpack(Board(4), 2, other)
    for _ in range(300):
        here, damaged = busy_board(), bytearray(data)
        damaged[random.integers(len(data))] = random.integers(256)
        unpack(here, 2, bytes(damaged))
        try:
            # What arrived may be wrong, and can be read in every way, or is an error.
            if stuck := stuck_ranks(here):
                explain_deadlock(here, stuck)
            find_mismatch(here)
        except (IndexError, UnicodeDecodeError):
            continue
