"""The status board: what every rank is doing, in memory that all ranks of one host share.

A rank writes to it before and after each operation with plain stores. Message number k on the edge
a -> b completes if and only if both ends have posted their k-th operation on that edge. So the
board shows exactly who waits for whom, and a deadlock is found without waiting for a timeout.

Ranks of other hosts send theirs in bytes (``pack``): numbers and texts of fixed length, so whoever
can write to the store that they travel through can make an explanation wrong, and no more.

Symbols: P ranks; an edge is an ordered pair (source, destination).
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

SEND, RECV = 0, 1

# LEFT: the rank's process group was destroyed, and its process may live on. LOST: its process has
# ended, and the run continues without it.
NOT_STARTED, RUNNING, RETURNED, LEFT, LOST = 0, 1, 2, 3, 4

RECV_ANY = "recv_any"

# How many descriptions each end of an edge keeps: two, and the one that is being overwritten.
DEPTH = 3

# How many collectives of a rank are kept. Ranks may be several collectives apart: the root may
# finish a broadcast before other ranks have begun it.
HISTORY = 8

# How many kinds of span are added up per rank; any further kinds share the last sum.
KINDS = 16

# One description, for example "float32 [3, 4]" or "broadcast float32 [4] from rank 0".
# (numpy truncates it, like all texts here, to the length of its field.)
_WHAT = "S96"

EDGE = np.dtype([("count", "i8"), ("posted_s", "f8", DEPTH), ("what", _WHAT, DEPTH)])

RANK = np.dtype(
    [
        ("state", "i8"),
        ("pid", "i8"),
        ("ticks", "i8"),
        ("op", "S32"),
        ("dst", "i8"),
        ("src", "i8"),
        # Operations of all ranks: how many this rank has come to, and when to the latest.
        ("joint", "i8"),
        ("joint_s", "f8", DEPTH),
        ("collectives", "i8"),
        ("announced", _WHAT, HISTORY),
        ("origin_s", "f8"),
        ("location", "S256"),
        ("done", "i8"),
        ("total", "i8"),
        ("label", "S128"),
        ("samples", "i8"),
        ("loss", "f8"),
        ("kinds", "S32", KINDS),
        # By lane (the main thread, all others): the seconds by kind of the spans that have ended,
        # the end of the last one in seconds of the trace, and which kind has begun since, plus 1.
        ("kind_s", "f8", (2, KINDS)),
        ("until_s", "f8", 2),
        ("begun", "i8", 2),
        ("gave_up", "S1024"),
        # The descriptor of memory that this rank shares; -1 if it could not open another's.
        ("shares", "i8"),
    ]
)


# Fields that other hosts are not sent: process ids and clock readings mean nothing there.
_HOST_FIELDS = {"pid", "origin_s", "joint_s", "posted_s", "shares"}


def _layout(world_size: int) -> np.dtype[np.void]:
    edges = (2, world_size, world_size)
    return np.dtype(
        [("ranks", RANK, world_size), ("edges", EDGE, edges), ("wanted", "?", edges[1:])]
    )


class Board:
    """The board of one run of P ranks.

    Args:
        world_size: P.
        memory: a writable buffer of ``Board.num_bytes(P)`` zero bytes that the processes share;
            None makes a private buffer (for a rank that no launcher watches).

    Attributes:
        ranks: [P] what each rank is doing.
        collectives: [P] how many collectives each rank has called;
        announced: [P, HISTORY] the latest of them.
        edges: [side, source, destination] the two ends of every edge, with the fields
        counts: [...] how many operations each end has posted so far;
        posted_s: [..., DEPTH] when the latest of them were posted;
        what: [..., DEPTH] the tensors they move, as ``describe`` names them.
        wanted: [rank, source] whether a rank in recv_any accepts a message from this source.
    """

    def __init__(self, world_size: int, memory: Any = None):
        self.world_size = world_size
        self.memory = bytearray(self.num_bytes(world_size)) if memory is None else memory
        fields = np.frombuffer(self.memory, _layout(world_size), count=1)[0]
        self.ranks = fields["ranks"]
        self.edges = fields["edges"]
        self.wanted = fields["wanted"]
        # A store into a column takes a fraction of the time of a store into a field of a row.
        self._columns = {name: self.ranks[name] for name in RANK.names or ()}
        self.collectives = self._columns["collectives"]
        self.announced = self._columns["announced"]
        self.counts = self.edges["count"]
        self.posted_s = self.edges["posted_s"]
        self.what = self.edges["what"]

    @staticmethod
    def num_bytes(world_size: int) -> int:
        return _layout(world_size).itemsize

    def copy(self) -> "Board":
        """Return a copy of the board as it is now, in private memory."""
        num_bytes = self.num_bytes(self.world_size)
        return Board(self.world_size, bytearray(memoryview(self.memory)[:num_bytes]))

    def pack(self, rank: int) -> bytes:
        """Return what ``rank`` has written as bytes, for the boards of other hosts."""
        return b"".join(np.ascontiguousarray(part).tobytes() for part in self._parts(rank))

    def unpack(self, rank: int, data: bytes) -> None:
        """Write what ``pack`` has made of ``rank`` elsewhere; ValueError for other bytes."""
        parts = list(self._parts(rank))
        if len(data) != sum(part.nbytes for part in parts):
            raise ValueError(f"{len(data)} bytes are not what a rank writes on a board")
        for part in parts:
            part[...] = np.frombuffer(data[: part.nbytes], part.dtype).reshape(part.shape)
            data = data[part.nbytes :]

    def _parts(self, rank: int) -> Iterator[Any]:
        """Yield views of what a rank writes: its row, its ends of all edges, its sources."""
        row = self.ranks[rank : rank + 1]
        for fields in (row, self.edges[SEND, rank], self.edges[RECV, :, rank]):
            yield from (fields[name] for name in fields.dtype.names if name not in _HOST_FIELDS)
        yield self.wanted[rank].view("u1")

    # Written by the rank itself

    def enter(
        self,
        rank: int,
        op: str,
        now_s: float,
        location: str,
        dst: int | None = None,
        src: int | None = None,
        sent: str = "",
        expected: str = "",
    ) -> None:
        """Post an operation; ``sent`` and ``expected`` describe the tensors of its two ends."""
        self.ranks[rank]["location"] = location.encode()
        if dst is not None:
            self._post((SEND, rank, dst), sent, now_s)
        if src is not None:
            self._post((RECV, src, rank), expected, now_s)
        self.in_operation(rank, op, dst, src)

    def _post(self, end: tuple[int, int, int], description: str, now_s: float) -> None:
        index = self.counts[end] % DEPTH
        self.what[end][index] = description.encode()
        self.posted_s[end][index] = now_s
        # Last: a reader that sees the new count also sees the new entry.
        self.counts[end] += 1

    def in_operation(
        self, rank: int, op: str, dst: int | None = None, src: int | None = None
    ) -> None:
        """Post which operation the rank is in, maybe again after others; ``""`` for none."""
        columns = self._columns
        columns["dst"][rank] = -1 if dst is None else dst
        columns["src"][rank] = -1 if src is None else src
        columns["op"][rank] = op.encode()
        columns["ticks"][rank] += 1

    def enter_any(self, rank: int, sources: list[int], location: str) -> None:
        """Post a recv_any from ``sources``; ``enter`` follows, with the source that was chosen."""
        self.ranks[rank]["location"] = location.encode()
        self.wanted[rank] = False
        self.wanted[rank, sources] = True
        self.in_operation(rank, RECV_ANY)

    def enter_joint(self, rank: int, op: str, now_s: float) -> None:
        """Post a joint operation: one that ends only when every rank has come to it."""
        counts = self._columns["joint"]
        self._columns["joint_s"][rank, counts[rank] % DEPTH] = now_s
        counts[rank] += 1
        self.in_operation(rank, op)

    def announce(self, rank: int, collective: str, location: str) -> None:
        """Post the next collective of this rank, for example ``broadcast float32 [4]``."""
        self._columns["location"][rank] = location.encode()
        self.announced[rank, self.collectives[rank] % HISTORY] = collective.encode()
        self.collectives[rank] += 1

    def leave(self, rank: int) -> None:
        """Post that the operation has ended."""
        self._columns["op"][rank] = b""
        self._columns["ticks"][rank] += 1

    def give_up(self, rank: int, reason: str) -> None:
        """Post that this rank will not continue, and why, unless another rank has done so."""
        if not self.gave_up():
            self.ranks[rank]["gave_up"] = reason.encode()

    def progress(self, rank: int, done: int, total: int, label: str, samples: int = 0) -> None:
        slot = self.ranks[rank]
        slot["label"] = label.encode()
        slot["done"] = done
        slot["total"] = total
        slot["samples"] += samples

    # Read by the ranks

    def gave_up(self) -> str:
        """Name the rank that has given up, and its reason; empty while none has."""
        for rank in np.flatnonzero(self.ranks["gave_up"] != b""):
            reason = self.ranks[rank]["gave_up"].decode(errors="replace")
            return f"rank {rank} gave up ({reason})"
        return ""

    def posted(self, rank: int) -> int:
        """The number of posts of a rank so far."""
        return int(self.ranks[rank]["ticks"]) + int(self.collectives[rank])

    def senders(self, rank: int, sources: list[int]) -> dict[int, float]:
        """Return the sources that have a message for ``rank``, and since when, in seconds."""
        sent, received = self.counts[:, :, rank]
        waiting = [source for source in sources if sent[source] > received[source]]
        posted_s = self.posted_s[SEND, :, rank]
        return {source: float(posted_s[source, received[source] % DEPTH]) for source in waiting}

    def arrived(
        self, rank: int, sent_to: int | None, received_from: int | None
    ) -> tuple[float, int | None]:
        """Return when the last peer came to the transfer that ``rank`` has ended (s), and who."""
        latest_s, latest_peer = 0.0, None
        if sent_to is not None:
            index = (int(self.counts[SEND, rank, sent_to]) - 1) % DEPTH
            latest_s = float(self.posted_s[RECV, rank, sent_to][index])
            latest_peer = sent_to
        if received_from is not None:
            index = (int(self.counts[RECV, received_from, rank]) - 1) % DEPTH
            came_s = float(self.posted_s[SEND, received_from, rank][index])
            if came_s >= latest_s:
                latest_s, latest_peer = came_s, received_from
        return latest_s, latest_peer

    def joint_arrived_s(self, rank: int) -> float:
        """Return when the last rank came to the latest joint operation of ``rank``, in s."""
        index = (int(self._columns["joint"][rank]) - 1) % DEPTH
        return max(self._columns["joint_s"][:, index].tolist())
