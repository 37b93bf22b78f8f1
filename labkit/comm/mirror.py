"""What one rank has written on the status board, as bytes for the board of another machine.

Process ids and readings of a clock stay at home, where alone they mean something. The bytes are
plain numbers and texts of fixed length: whoever can write to the store that they travel through
can make an explanation wrong, and no more.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from labkit.comm.board import EDGE, RANK, RECV, SEND, Board

Layout = np.dtype[Any]


def _without(layout: Layout, *names: str) -> Layout:
    return np.dtype([(one, layout[one]) for one in layout.names or () if one not in names])


_ROW, _END = _without(RANK, "pid", "origin_s", "meeting_s"), _without(EDGE, "posted_s")


def _layout(world_size: int) -> Layout:
    """A rank's row, its ends of all edges, and whom it would receive from."""
    ends = [("sends", _END, (world_size,)), ("recvs", _END, (world_size,))]
    return np.dtype([("row", _ROW), *ends, ("wanted", "u1", (world_size,))])


def pack(board: Board, rank: int) -> bytes:
    """What ``rank`` has written to ``board``."""
    packed = np.zeros((), _layout(board.world_size))
    for part, place in _places(board, rank):
        _copy(place, packed[part], packed[part].dtype.names)
    return packed.tobytes()


def unpack(board: Board, rank: int, data: bytes) -> None:
    """Write what ``pack`` has made of ``rank`` elsewhere to ``board``.

    Raises:
        ValueError: the bytes are not as many as ``pack`` makes.
    """
    (packed,) = np.frombuffer(data, _layout(board.world_size))
    for part, place in _places(board, rank):
        _copy(packed[part], place, packed[part].dtype.names)


def _places(board: Board, rank: int) -> Iterator[tuple[str, Any]]:
    yield "row", board.ranks[rank]
    yield "sends", board.edges[SEND, rank]
    yield "recvs", board.edges[RECV, :, rank]
    yield "wanted", board.wanted[rank]


def _copy(source: Any, target: Any, names: Sequence[str] | None) -> None:
    if names is None:
        target[...] = source
    for name in names or ():
        target[name] = source[name]
