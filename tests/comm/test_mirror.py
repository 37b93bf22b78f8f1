"""The rows of a board as bytes: what arrives, and that damage never gets onto a board."""

import struct
import zlib

import numpy as np
import pytest

from labkit.comm.board import EDGE, LEFT, RANK, RECV, RUNNING, SEND, Board
from labkit.comm.deadlock import explain_deadlock, find_mismatch, stuck_ranks, waits
from labkit.comm.mirror import _HEAD, _layout, pack, unpack

RANKS = [2, 3]


def busy_board() -> Board:
    """A board on which every rank of four has written something everywhere."""
    board = Board(4)
    for rank in range(4):
        slot = board.ranks[rank]
        slot["state"], slot["pid"], slot["origin_s"] = RUNNING, 100 + rank, 5.0
        board.announce(
            rank, f"ring_all_reduce float32 [{rank}] sum", f'"k\u00f6nig.py", line {rank}'
        )
        for other in range(4):
            if other != rank:
                ends = (other, "float32 [4]"), (other, "int8 [1]")
                board.enter(rank, "exchange", 7.0, '"a.py", line 3', *ends)
        board.enter_any(rank, [(rank + 1) % 4], '"a.py", line 4')
        board.progress(rank, 3, 10, "steps", samples=4)
        slot["loss"], slot["kind_s"] = 0.25, rank + 0.5
    return board


def same_but(there: Board, here: Board, ranks) -> None:
    """Checks that all but pids and clocks of ``ranks`` is equal on both boards."""
    own = [name for name in RANK.names if name not in ("pid", "origin_s", "meeting_s")]
    for rank in ranks:
        for name in own:
            assert np.array_equal(there.ranks[rank][name], here.ranks[rank][name]), name
        assert np.array_equal(there.wanted[rank], here.wanted[rank])
        for name in set(EDGE.names) - {"posted_s"}:
            assert np.array_equal(there.edges[name][SEND, rank], here.edges[name][SEND, rank])
            assert np.array_equal(
                there.edges[name][RECV, :, rank], here.edges[name][RECV, :, rank]
            )


def test_what_some_ranks_have_written_arrives_and_nothing_else_changes():
    there, here = busy_board(), Board(4)
    data = pack(there, RANKS)
    assert len(data) < 2000
    unpack(here, RANKS, data)
    same_but(there, here, RANKS)
    assert not here.ranks["pid"].any()
    assert not here.ranks["origin_s"].any()
    assert not here.posted_s.any()
    assert not here.ranks["op"][:2].any()
    assert not here.counts[SEND, :2].any()


def test_a_mirrored_board_explains_a_deadlock_over_two_hosts():
    one, other = Board(2), Board(2)
    one.ranks["state"] = other.ranks["state"] = RUNNING
    one.enter(0, "recv", 1.0, '"a.py", line 1', expected=(1, "float32 [4]"))
    other.enter(1, "recv", 1.0, '"a.py", line 2', expected=(0, "float32 [4]"))
    assert stuck_ranks(one) == stuck_ranks(other) == []
    unpack(one, [1], pack(other, [1]))
    unpack(other, [0], pack(one, [0]))
    assert explain_deadlock(one, stuck_ranks(one)) == explain_deadlock(other, stuck_ranks(other))
    assert stuck_ranks(one) == [0, 1]


def test_a_mirrored_board_shows_a_mismatch():
    one, other = Board(2), Board(2)
    one.enter(0, "send", 1.0, '"a.py", line 1', sent=(1, "float32 [4]"))
    other.enter(1, "recv", 1.0, '"a.py", line 2', expected=(0, "float32 [5]"))
    assert find_mismatch(one) == ""
    unpack(one, [1], pack(other, [1]))
    assert waits(one, 0) == []
    assert 'receives into float32 [5], at "a.py", line 2' in find_mismatch(one)


def rewritten(data: bytes, change) -> bytes:
    """``data`` with ``change(rows)`` made to what it holds."""
    head = data[: _HEAD.size]
    rows = np.frombuffer(bytearray(zlib.decompress(data[_HEAD.size :])), _layout(4))
    change(rows)
    return head + zlib.compress(rows.tobytes())


def set_in(row: int, *names, value):
    def change(rows):
        place = rows[row]
        for name in names[:-1]:
            place = place[name]
        place[names[-1]] = value

    return change


LIES = [
    set_in(0, "row", "dst", value=4),
    set_in(0, "row", "src", value=-2),
    set_in(1, "row", "state", value=LEFT + 2),
    set_in(0, "row", "collectives", value=-1),
    set_in(0, "row", "begun", value=[17, 0]),
    set_in(0, "row", "kind_s", value=float("nan")),
    set_in(0, "row", "until_s", value=float("inf")),
    set_in(0, "sends", "count", value=-1),
    set_in(0, "wanted", value=2),
    set_in(0, "row", "op", value=b"\xff\xfe"),
]


@pytest.mark.parametrize("lie", LIES)
def test_a_number_or_text_that_no_rank_writes_is_refused_and_changes_nothing(lie):
    here = busy_board()
    before = bytes(here.memory)
    with pytest.raises(ValueError, match=r"numbers that no rank writes|no text"):
        unpack(here, RANKS, rewritten(pack(here, RANKS), lie))
    assert bytes(here.memory) == before


def test_control_characters_become_blanks():
    here = Board(4)
    change = set_in(0, "row", "location", value=b'"a\x1b[31m\n.py", line 2')
    unpack(here, RANKS, rewritten(pack(busy_board(), RANKS), change))
    assert here.ranks[2]["location"] == b'"a [31m .py", line 2'


def test_a_text_that_was_cut_within_a_character_arrives():
    there, here = Board(4), Board(4)
    there.announce(2, "x", "\u00e4" * 200 + "b")
    there.announce(3, "x", "b" + "\u00e4" * 200)
    unpack(here, RANKS, pack(there, RANKS))
    assert here.ranks[2]["location"].decode() == "\u00e4" * 128
    assert here.ranks[3]["location"].decode() == "b" + "\u00e4" * 127


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:10],
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"another!" + data[8:],
        lambda data: data[: _HEAD.size],
        lambda data: data[: _HEAD.size] + zlib.compress(bytes(10**6)),
        lambda data: struct.pack("!8sIIB", b"labkit-m", 4, 2, 7) + data[_HEAD.size :],
        lambda data: struct.pack("!8sIIB", b"labkit-m", 5, 2, 0) + data[_HEAD.size :],
        lambda data: struct.pack("!8sIIB", b"labkit-m", 4, 2**32 - 1, 0) + data[_HEAD.size :],
    ],
)
def test_other_bytes_are_refused(damage):
    with pytest.raises(ValueError, match=r"bytes|read|rows"):
        unpack(Board(4), RANKS, damage(pack(busy_board(), RANKS)))


def test_random_damage_is_refused_or_harmless():
    there, random = busy_board(), np.random.default_rng(0)
    data = pack(there, RANKS)
    for _ in range(300):
        here = Board(4)
        place, value = random.integers(2**31, size=2)

        def damage(rows, place=place, value=value):
            rows.view(np.uint8).reshape(-1)[place % rows.nbytes] = value % 256

        try:
            unpack(here, RANKS, rewritten(data, damage))
        except ValueError:
            continue
        # What was taken can be read in every way.
        stuck = stuck_ranks(here)
        if stuck:
            explain_deadlock(here, stuck)
        find_mismatch(here)
