"""A mirror of the status board: what the ranks of one host have written, as bytes for the others.

Every host has a board with a place for every rank of the run. Its own ranks write into it; the
places of all others are mirrored from their hosts' boards, some times a second. So whatever reads
a board (the search for a deadlock, its explanation, a live figure) sees the whole run.

Process ids and readings of a clock stay at home, since they mean nothing on another host. The
bytes are plain numbers and texts of fixed length, compressed. Whoever can write to the store they
travel through could have made them, so every number is checked before it reaches a board: it may
be wrong, and never leads outside of an array. Control characters are blanked: texts from a board
are printed.

Symbols: P ranks.
"""

import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from labkit.comm.board import EDGE, KINDS, LOST, RANK, RECV, SEND, Board

# Mark, P, how many ranks.
_HEAD = struct.Struct("!8sII")
_MARK = b"labkit-m"

_NOT_OF_ROWS = ("pid", "origin_s", "meeting_s")
_NOT_OF_ENDS = ("posted_s",)


def _without(layout: np.dtype[Any], names: Sequence[str]) -> np.dtype[Any]:
    kept = [name for name in layout.names or () if name not in names]
    return np.dtype([(name, layout[name]) for name in kept])


_ROW, _END = _without(RANK, _NOT_OF_ROWS), _without(EDGE, _NOT_OF_ENDS)

# Of the numbers of a row the least and the largest value; those of all others are +-_MOST.
_MOST = 2**62
_COUNTERS = ("count", "collectives", "ticks")
_COUNTED = ("ticks", "meetings", "collectives")


def _layout(world_size: int) -> np.dtype[Any]:
    """What one rank writes: its row, its ends of the edges, and whom it would receive from."""
    ends = [("sends", _END, (world_size,)), ("recvs", _END, (world_size,))]
    return np.dtype([("row", _ROW), *ends, ("wanted", "u1", (world_size,))])


def pack(board: Board, ranks: Sequence[int]) -> bytes:
    """What ``ranks`` have written to ``board``, for ``unpack`` on another host."""
    packed = np.zeros(len(ranks), _layout(board.world_size))
    for mine, rank in zip(packed, ranks):
        # A rank counts an entry after it has written it: so the counter is read before the entry.
        for part, place in reversed(list(_places(board, rank))):
            _copy(place, mine[part], counters_last=False)
    head = _HEAD.pack(_MARK, board.world_size, len(ranks))
    return head + zlib.compress(packed.tobytes(), level=1)


def unpack(board: Board, ranks: Sequence[int], data: bytes) -> None:
    """Write what ``pack`` has made of ``ranks`` on another host into their places on ``board``.

    Raises:
        ValueError: ``data`` is nothing that ``pack`` has made for these ranks. The board is as
            before.
    """
    found = _read(board, ranks, data)
    for mine, rank in zip(found, ranks):
        _check_numbers(mine, rank, board.world_size)
    _check_texts(found)
    for mine, rank in zip(found, ranks):
        for part, place in _places(board, rank):
            _copy(mine[part], place, counters_last=True)


def _read(board: Board, ranks: Sequence[int], data: bytes) -> np.ndarray[Any, np.dtype[Any]]:
    """What ``data`` holds of each of ``ranks``."""
    if len(data) < _HEAD.size:
        raise ValueError(f"{len(data)} bytes are too few for the rows of a status board")
    if _HEAD.unpack_from(data) != (_MARK, board.world_size, len(ranks)):
        raise ValueError(
            f"the bytes are not the rows of {len(ranks)} of {board.world_size} ranks: is it the "
            "same labkit on all hosts?"
        )
    layout = _layout(board.world_size)
    due = layout.itemsize * len(ranks)
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(data[_HEAD.size :], due + 1)
    except zlib.error as error:
        raise ValueError(f"the rows of a status board cannot be read: {error}") from None
    if len(plain) != due or not unpacker.eof or unpacker.unused_data:
        raise ValueError(f"the rows of a status board are not of {due} bytes")
    return np.frombuffer(bytearray(plain), layout)


def _places(board: Board, rank: int) -> Iterator[tuple[str, Any]]:
    """The parts of what a rank writes, and their places on the board; counters come late."""
    yield "wanted", board.wanted[rank]
    yield "row", board.ranks[rank]
    yield "sends", board.edges[SEND, rank]
    yield "recvs", board.edges[RECV, :, rank]


def _copy(source: Any, target: Any, counters_last: bool) -> None:
    """Copy the fields that both have."""
    if (names := source.dtype.names) is None:
        target[...] = source
        return
    both = [name for name in names if name in target.dtype.names]
    for name in sorted(both, key=lambda name: (name in _COUNTERS) == counters_last):
        target[name] = source[name]


def _check_numbers(mine: Any, rank: int, world_size: int) -> None:
    row = mine["row"]
    limits = {name: (-_MOST, _MOST) for name in _ROW.names or () if _ROW[name].kind == "i"}
    limits |= dict.fromkeys(_COUNTED, (0, _MOST))
    limits |= dict.fromkeys(("dst", "src"), (-1, world_size - 1))
    limits |= {"state": (0, LOST), "begun": (0, KINDS)}
    numbers = [(row[name], *limits[name]) for name in limits]
    for part in ("sends", "recvs"):
        numbers.append((mine[part]["count"], 0, _MOST))
    numbers.append((mine["wanted"], 0, 1))
    numbers += [(row[name], -_MOST, _MOST) for name in ("kind_s", "until_s")]
    for values, least, most in numbers:
        # Not a number is not within any range either.
        if not np.all((values >= least) & (values <= most)):
            raise ValueError(f"the row of rank {rank} holds numbers that no rank writes")


def _check_texts(found: np.ndarray[Any, np.dtype[Any]]) -> None:
    """Blank control characters; ValueError for what is no text.

    (A long text is cut to its field, maybe within a character.)
    """
    for values in _texts_of(found):
        for index in zip(*np.nonzero(values != b"")):
            text = values[index]
            is_full = len(text) == values.itemsize
            try:
                plain = text.decode(errors="ignore" if is_full else "strict")
            except UnicodeDecodeError:
                raise ValueError("a row of a status board holds bytes that are no text") from None
            if is_full or not plain.isprintable():
                shown = (char if char.isprintable() else " " for char in plain)
                values[index] = "".join(shown).encode()


def _texts_of(part: Any) -> Iterator[np.ndarray[Any, np.dtype[np.bytes_]]]:
    """All the fields of text in ``part``, as views."""
    for name in part.dtype.names:
        field = part[name]
        if field.dtype.names is not None:
            yield from _texts_of(field)
        elif field.dtype.kind == "S":
            yield field
