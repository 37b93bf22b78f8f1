"""The status board: what every rank is doing, in memory that all ranks of one host share.

A rank writes to it before and after each operation with plain stores, so the fast path costs no
system call. A transfer is a meeting of two ranks: message number k on the edge a -> b completes if
and only if both ends have posted their k-th operation on that edge. So the board shows exactly who
waits for whom, and a deadlock is found without waiting for a timeout.

Symbols: P ranks; an edge is an ordered pair (source, destination).
"""

from collections.abc import Sequence

import numpy as np

SEND, RECV = 0, 1

# LEFT: the rank's process group was destroyed, and its process may live on. LOST: its process has
# ended, and the run continues without it.
NOT_STARTED, RUNNING, RETURNED, LEFT, LOST = 0, 1, 2, 3, 4

RECV_ANY = "recv_any"

# How many descriptions each end of an edge keeps. Where a send waits for its receive, two suffice,
# and one more while the peer overwrites the oldest.
DEPTH = 3

# How many collectives of a rank are kept. Ranks may be several collectives apart: the root may
# finish a broadcast before other ranks have begun it.
HISTORY = 8

# How many kinds of span are added up per rank; any further kinds share the last place.
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
        ("any_what", _WHAT),
        ("meetings", "i8"),
        ("meeting_s", "f8", DEPTH),
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
    ]
)

# What ends the run on this host, where no launcher does.
_CONCLUSION = np.dtype([("length", "i8"), ("text", "S16384")])


class Board:
    """The board of one run of P ranks.

    Args:
        world_size: P.
        memory: a writable buffer of ``Board.num_bytes(P)`` zero bytes that the processes share;
            None makes a private buffer (for a rank that no launcher watches).

    Attributes:
        ranks: [P] what each rank is doing.
        collectives: [P] how many collectives each rank has called.
        edges: [side, source, destination] the two ends of every edge: the four fields below.
        counts: [side, source, destination] the number of operations that each end of an edge has
            posted so far.
        posted_s: [side, source, destination, DEPTH] when the latest of them were posted.
        what: [side, source, destination, DEPTH] the tensors they move, as ``describe`` names them.
        wanted: [rank, source] whether a rank in recv_any accepts a message from this source.
    """

    def __init__(self, world_size: int, memory: bytearray | memoryview | None = None):
        if memory is None:
            memory = bytearray(self.num_bytes(world_size))
        self.world_size = world_size
        self.memory = memory
        edges_at = world_size * RANK.itemsize
        wanted_at = edges_at + 2 * world_size**2 * EDGE.itemsize
        seen = wanted_at + world_size**2
        view = memoryview(memory).cast("B")
        self.ranks = np.frombuffer(view[:edges_at], dtype=RANK)
        self.collectives = self.ranks["collectives"]
        edges = np.frombuffer(view[edges_at:wanted_at], dtype=EDGE)
        self.edges = edges = edges.reshape(2, world_size, world_size)
        self.counts, self.posted_s, self.what = edges["count"], edges["posted_s"], edges["what"]
        wanted = np.frombuffer(view[wanted_at:seen], dtype=bool)
        self.wanted = wanted.reshape(world_size, world_size)
        if len(view) > seen:
            rest = view[seen : self.num_bytes(world_size)]
            self._concluded = np.frombuffer(rest, dtype=_CONCLUSION)

    @staticmethod
    def num_bytes(world_size: int) -> int:
        return _num_bytes_seen(world_size) + _CONCLUSION.itemsize

    def copy(self) -> "Board":
        """A copy of the board as it is now, in private memory, without the conclusion."""
        end = _num_bytes_seen(self.world_size)
        return Board(self.world_size, bytearray(memoryview(self.memory).cast("B")[:end]))

    # Written by the rank itself

    def enter(
        self,
        rank: int,
        op: str,
        now_s: float,
        location: str,
        sent: tuple[int, str] | None = None,
        expected: tuple[int, str] | None = None,
    ) -> None:
        """Post an operation: ``sent`` is (destination, what), ``expected`` is (source, what)."""
        slot = self.ranks[rank]
        slot["location"] = location.encode()
        slot["dst"] = sent[0] if sent else -1
        slot["src"] = expected[0] if expected else -1
        slot["op"] = op.encode()
        if sent:
            self._post((SEND, rank, sent[0]), sent[1], now_s)
        if expected:
            self._post((RECV, expected[0], rank), expected[1], now_s)
        slot["ticks"] += 1

    def _post(self, end: tuple[int, int, int], what: str, now_s: float) -> None:
        index = self.counts[end] % DEPTH
        self.what[end][index] = what.encode()
        self.posted_s[end][index] = now_s
        # Last: a reader that sees the new count also sees the new entry.
        self.counts[end] += 1

    def enter_any(self, rank: int, sources: list[int], what: str, location: str) -> None:
        """Post a recv_any from ``sources``; ``enter`` follows, with the source that was chosen."""
        slot = self.ranks[rank]
        slot["location"] = location.encode()
        slot["any_what"] = what.encode()
        self.wanted[rank] = False
        self.wanted[rank, sources] = True
        slot["dst"] = slot["src"] = -1
        slot["op"] = RECV_ANY.encode()
        slot["ticks"] += 1

    def enter_meeting(self, rank: int, op: str, now_s: float) -> None:
        """Post an operation that ends only when every rank has come to it."""
        slot = self.ranks[rank]
        slot["dst"] = slot["src"] = -1
        slot["op"] = op.encode()
        slot["meeting_s"][slot["meetings"] % DEPTH] = now_s
        slot["meetings"] += 1
        slot["ticks"] += 1

    def announce(self, rank: int, what: str, location: str) -> None:
        """Post the next collective of this rank, for example ``broadcast float32 [4]``."""
        slot = self.ranks[rank]
        slot["location"] = location.encode()
        slot["announced"][self.collectives[rank] % HISTORY] = what.encode()
        self.collectives[rank] += 1

    def again(self, rank: int, op: str, dst: int | None, src: int | None) -> None:
        """Post that the rank is in an operation again that it had entered before others."""
        slot = self.ranks[rank]
        slot["dst"] = -1 if dst is None else dst
        slot["src"] = -1 if src is None else src
        slot["op"] = op.encode()
        slot["ticks"] += 1

    def leave(self, rank: int) -> None:
        """Post that the operation has ended."""
        slot = self.ranks[rank]
        slot["op"] = b""
        slot["ticks"] += 1

    def give_up(self, rank: int, why: str) -> None:
        """Post that this rank will not continue, and why, unless another rank has done so."""
        if not self.gave_up():
            self.ranks[rank]["gave_up"] = why.encode()

    def conclude(self, text: bytes) -> None:
        """Post what ends the run for all ranks of this host, unless it is known already."""
        if not self.conclusion():
            self._concluded["text"] = text
            self._concluded["length"] = min(len(text), _CONCLUSION["text"].itemsize)

    def conclusion(self) -> bytes:
        """What ends the run; empty while it goes on."""
        return bytes(self._concluded["text"][0])[: int(self._concluded["length"][0])]

    def progress(self, rank: int, done: int, total: int, label: str, samples: int = 0) -> None:
        slot = self.ranks[rank]
        slot["label"] = label.encode()
        slot["done"], slot["total"] = done, total
        slot["samples"] += samples

    # Read by the ranks

    def gave_up(self) -> str:
        """Which rank has given up, and why; empty while none has."""
        for rank in np.flatnonzero(self.ranks["gave_up"] != b""):
            why = self.ranks[rank]["gave_up"].decode(errors="replace")
            return f"rank {rank} gave up ({why})"
        return ""

    def posted(self, rank: int) -> int:
        """The number of posts of a rank so far; if it is unchanged, no new operation has begun."""
        return int(self.ranks[rank]["ticks"]) + int(self.collectives[rank])

    def ticks(self) -> tuple[int, ...]:
        """A fingerprint of all ranks' progress: if it is unchanged, no rank has moved."""
        return tuple(int(value) for value in self.ranks["ticks"])

    def senders(self, rank: int, sources: list[int]) -> dict[int, float]:
        """The sources that have a message for ``rank``, and since when, in seconds."""
        since_s = {}
        for source in sources:
            received = int(self.counts[RECV, source, rank])
            if self.counts[SEND, source, rank] > received:
                posted_s = self.posted_s[SEND, source, rank]
                since_s[source] = float(posted_s[received % DEPTH])
        return since_s

    def arrived_s(self, rank: int, sent_to: int | None, received_from: int | None) -> float:
        """When the last peer came to the transfer that ``rank`` has just ended, in seconds."""
        latest = 0.0
        for side, source, destination in ((RECV, rank, sent_to), (SEND, received_from, rank)):
            if source is not None and destination is not None:
                mine = int(self.counts[1 - side, source, destination]) - 1
                came_s = self.posted_s[side, source, destination][mine % DEPTH]
                latest = max(latest, float(came_s))
        return latest

    def meeting_arrived_s(self, rank: int, among: Sequence[int] | None = None) -> float:
        """When the last rank came to the meeting that ``rank`` is in or has just left, in s.

        ``among``: the last of these ranks; by default of all.
        """
        index = (int(self.ranks[rank]["meetings"]) - 1) % DEPTH
        came_s = self.ranks["meeting_s"][:, index]
        return float((came_s if among is None else came_s[list(among)]).max())


def _num_bytes_seen(world_size: int) -> int:
    """The size of the part that the launcher looks at many times a second."""
    return world_size * RANK.itemsize + world_size**2 * (2 * EDGE.itemsize + 1)
