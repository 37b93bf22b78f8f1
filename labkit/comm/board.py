"""The status board: what every rank is doing, in memory that all processes of a run share.

A rank writes to it before and after each operation with plain stores, so the fast path costs no
system call. The launcher reads it from outside. Since a transfer is a meeting of two ranks (a send
ends when its receive has started), message number k on the edge a -> b completes if and only if
both ends have posted their k-th operation on that edge. So who waits for whom is known exactly,
and a deadlock is found by looking, not by waiting for a timeout.

Symbols: P ranks; an edge is an ordered pair (source, destination).
"""

from dataclasses import dataclass

import numpy as np

from labkit.errors import MismatchError

SEND, RECV = 0, 1


# A rank that has left (its process group is destroyed) may be a process that lives on; one that is
# lost has ended, and the run goes on without it.
NOT_STARTED, RUNNING, RETURNED, LEFT, LOST = 0, 1, 2, 3, 4


RECV_ANY = "recv_any"


# The last so many descriptions an end. Where a send waits for its receive two suffice; where it
# only queues (NCCL) the peer may be writing the next one, over the oldest, while one is read.
_DEPTH = 3


# Ranks may be some collectives apart: a root that broadcasts waits for nobody.
_HISTORY = 8


_OP_BYTES = 32


_WHY_BYTES = 1024


_EDGE = np.dtype([("count", "i8"), ("posted_s", "f8", _DEPTH), ("what", "S96", _DEPTH)])


_RANK = np.dtype(
    [
        ("state", "i8"),
        ("pid", "i8"),
        ("ticks", "i8"),
        ("op", f"S{_OP_BYTES}"),
        ("dst", "i8"),
        ("src", "i8"),
        ("any_what", "S96"),
        ("meetings", "i8"),
        ("meeting_s", "f8", _DEPTH),
        ("collectives", "i8"),
        ("announced", "S96", _HISTORY),
        ("origin_s", "f8"),
        ("location", "S256"),
        ("done", "i8"),
        ("total", "i8"),
        ("label", "S128"),
        ("gave_up", f"S{_WHY_BYTES}"),
    ]
)


@dataclass(frozen=True)
class Waiting:
    """One thing that keeps ``rank`` from going on: ``peer`` has not come to ``what``.

    With ``any_of`` it is one of several, of which one is enough.
    """

    rank: int
    peer: int
    op: str
    what: str
    any_of: bool = False


class Board:
    """The board of one run of P ranks.

    Args:
        world_size: P.
        memory: a writable buffer of ``Board.num_bytes(P)`` zero bytes that the processes share;
            None keeps a private one (a rank that no launcher watches).
    """

    def __init__(self, world_size: int, memory=None):
        if memory is None:
            memory = bytearray(self.num_bytes(world_size))
        self.world_size = world_size
        self._memory = memory
        split = world_size * _RANK.itemsize
        second_split = split + 2 * world_size**2 * _EDGE.itemsize
        view = memoryview(memory).cast("B")
        self.ranks = np.frombuffer(view[:split], dtype=_RANK)
        # Indexed [side, source, destination].
        self.edges = np.frombuffer(view[split:second_split], dtype=_EDGE).reshape(
            2, world_size, world_size
        )
        # [rank, source]: from whom a rank in recv_any would take its message.
        self.wanted = np.frombuffer(
            view[second_split : self.num_bytes(world_size)], dtype=bool
        ).reshape(world_size, world_size)
        self._count = self.edges["count"]
        self._posted_s = self.edges["posted_s"]
        self._what = self.edges["what"]

    @staticmethod
    def num_bytes(world_size: int) -> int:
        return world_size * _RANK.itemsize + world_size**2 * (2 * _EDGE.itemsize + 1)

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
        """Post an operation: ``sent`` is (destination, description), ``expected`` (source, same).

        Raises:
            MismatchError: the peer has posted its end already and describes another message.
        """
        slot = self.ranks[rank]
        slot["location"] = location.encode()[:256]
        slot["dst"] = sent[0] if sent else -1
        slot["src"] = expected[0] if expected else -1
        slot["op"] = op.encode()
        if sent:
            self._post(SEND, rank, sent[0], sent[1], now_s)
        if expected:
            self._post(RECV, expected[0], rank, expected[1], now_s)
        slot["ticks"] += 1
        if sent:
            self._compare(SEND, rank, sent[0])
        if expected:
            self._compare(RECV, expected[0], rank)

    def _post(self, side: int, source: int, destination: int, what: str, now_s: float) -> None:
        edge = (side, source, destination)
        index = self._count[edge] % _DEPTH
        self._what[edge][index] = what.encode()[:96]
        self._posted_s[edge][index] = now_s
        self._count[edge] += 1

    def _compare(self, side: int, source: int, destination: int) -> None:
        mine = int(self._count[side, source, destination]) - 1
        theirs = self._count[1 - side]
        if theirs[source, destination] <= mine:
            return
        sent = self._what[SEND, source, destination][mine % _DEPTH].decode(errors="replace")
        expected = self._what[RECV, source, destination][mine % _DEPTH].decode(errors="replace")
        # Counted again after the reading: a peer that is fewer than all slots ahead has not begun
        # to write over this one.
        if theirs[source, destination] < mine + _DEPTH and sent != expected:
            sender, receiver = (self.ranks[r]["location"].decode() for r in (source, destination))
            raise MismatchError(
                f"message {mine + 1} from rank {source} to rank {destination} does not fit:\n"
                f"  rank {source} sends {sent}, at {sender}\n"
                f"  rank {destination} receives into {expected}, at {receiver}\n"
                "Next step: give both ends the same shape and dtype."
            )

    def enter_any(self, rank: int, sources: list[int], what: str, location: str) -> None:
        """Post that ``rank`` will receive ``what`` from whichever source sends first.

        ``enter`` follows, with the source that was chosen.
        """
        slot = self.ranks[rank]
        slot["location"] = location.encode()[:256]
        slot["any_what"] = what.encode()[:96]
        self.wanted[rank] = False
        self.wanted[rank, sources] = True
        slot["dst"] = slot["src"] = -1
        slot["op"] = RECV_ANY.encode()
        slot["ticks"] += 1

    def first_sender(self, rank: int, sources: list[int]) -> int | None:
        """The source whose message to ``rank`` has waited longest; None where there is none."""
        since_s = {}
        for source in sources:
            received = int(self._count[RECV, source, rank])
            if self._count[SEND, source, rank] > received:
                posted_s = self._posted_s[SEND, source, rank]
                since_s[source] = float(posted_s[received % _DEPTH])
        return min(since_s, key=since_s.get, default=None)

    def enter_meeting(self, rank: int, op: str, now_s: float) -> None:
        """Post a collective that ends only when every rank has come to it."""
        slot = self.ranks[rank]
        slot["dst"] = slot["src"] = -1
        slot["op"] = op.encode()[:_OP_BYTES]
        slot["meeting_s"][slot["meetings"] % _DEPTH] = now_s
        slot["meetings"] += 1
        slot["ticks"] += 1

    def announce(self, rank: int, what: str, location: str) -> None:
        """Post the next collective of this rank, for example ``broadcast float32 [4]``.

        Raises:
            MismatchError: another rank has called a different one, or with another tensor.
        """
        slot = self.ranks[rank]
        slot["location"] = location.encode()[:256]
        mine = int(slot["collectives"])
        slot["announced"][mine % _HISTORY] = what.encode()[:96]
        slot["collectives"] = mine + 1
        for other in range(self.world_size):
            if other == rank or self.ranks[other]["collectives"] <= mine:
                continue
            theirs = bytes(self.ranks[other]["announced"][mine % _HISTORY])
            # Counted again after the reading, as in ``_compare``.
            written_over = self.ranks[other]["collectives"] >= mine + _HISTORY
            if theirs != what.encode()[:96] and not written_over:
                raise MismatchError(self._parted(rank, other, mine))

    def _parted(self, rank: int, other: int, index: int) -> str:
        """Both sequences of collectives, from a little before the one in which they part."""
        first, second = sorted((rank, other))
        lines = [f"rank {first} and rank {second} call different collectives:"]
        for number in (first, second):
            lines.append(f"  rank {number}: {self.sequence(number, index + 1)}")
        lines.append(
            "Next step: let all ranks call the same collectives in the same order, with tensors "
            "of one shape and dtype."
        )
        return "\n".join(lines)

    def sequence(self, rank: int, up_to: int | None = None, length: int = 3) -> str:
        """The latest collectives of a rank: ``1. broadcast float32 [4], 2. barrier``."""
        slot = self.ranks[rank]
        count = int(slot["collectives"])
        last = count if up_to is None else min(up_to, count)
        first = max(0, last - length, count - _HISTORY)
        names = (slot["announced"][index % _HISTORY].decode() for index in range(first, last))
        shown = [f"{number}. {name}" for number, name in enumerate(names, first + 1)]
        return ", ".join(["..."] * (first > 0) + shown) or "none"

    def compared(self, *ranks: int) -> str:
        """The sequences of some ranks, as lines to add to a text; empty if all are as long."""
        if len({int(self.ranks[rank]["collectives"]) for rank in ranks}) < 2:
            return ""
        lines = ["", "The latest collectives that each rank has called:"]
        lines += [f"  rank {rank}: {self.sequence(rank)}" for rank in ranks]
        return "\n".join(lines)

    def posted(self, rank: int) -> int:
        """How much a rank has posted so far: unchanged means that nobody waits for more of it."""
        return int(self.ranks[rank]["ticks"]) + int(self.ranks[rank]["collectives"])

    def leave(self, rank: int) -> None:
        slot = self.ranks[rank]
        slot["op"] = b""
        slot["ticks"] += 1

    def arrived_s(self, rank: int, sent_to: int | None, received_from: int | None) -> float:
        """When the peers of the transfer that ``rank`` has just ended had come to it."""
        latest = 0.0
        for side, source, destination in (
            (RECV, rank, sent_to),
            (SEND, received_from, rank),
        ):
            if source is None or destination is None:
                continue
            mine = int(self._count[1 - side, source, destination]) - 1
            latest = max(latest, float(self._posted_s[side, source, destination][mine % _DEPTH]))
        return latest

    def meeting_arrived_s(self, rank: int) -> float:
        """When the last rank had come to the meeting that ``rank`` is in or has just left."""
        index = (int(self.ranks[rank]["meetings"]) - 1) % _DEPTH
        return float(self.ranks["meeting_s"][:, index].max())

    def give_up(self, rank: int, why: str) -> None:
        """Post that this rank will not go on; only the first to do so says why."""
        if not self.gave_up():
            self.ranks[rank]["gave_up"] = why.encode()[:_WHY_BYTES]

    def gave_up(self) -> str:
        """Which rank has given up, and why; empty while none has."""
        for rank in np.flatnonzero(self.ranks["gave_up"] != b""):
            why = self.ranks[rank]["gave_up"].decode(errors="replace")
            return f"rank {rank} gave up ({why})"
        return ""

    def progress(self, rank: int, done: int, total: int, label: str) -> None:
        slot = self.ranks[rank]
        slot["label"] = label.encode()[:128]
        slot["done"], slot["total"] = done, total

    # Read by the launcher

    def copy(self) -> "Board":
        return Board(self.world_size, bytearray(memoryview(self._memory).cast("B")))

    def waits(self, rank: int) -> list[Waiting]:
        """What the rank is waiting for at this moment: empty when it can go on by itself."""
        slot = self.ranks[rank]
        op = slot["op"].decode()
        if slot["state"] != RUNNING or not op:
            return []
        found = []
        dst, src = int(slot["dst"]), int(slot["src"])
        if op == RECV_ANY and src < 0:
            return self._waits_for_any(rank)
        if dst < 0 and src < 0:
            mine = int(slot["meetings"])
            return [
                Waiting(rank, peer, op, f"at {op} number {mine}")
                for peer in range(self.world_size)
                if self.ranks[peer]["meetings"] < mine
            ]
        if dst >= 0 and self._open(SEND, rank, dst):
            found.append(Waiting(rank, dst, op, f"to receive {self._last(SEND, rank, dst)}"))
        if src >= 0 and self._open(RECV, src, rank):
            found.append(Waiting(rank, src, op, f"to send {self._last(RECV, src, rank)}"))
        return found

    def _waits_for_any(self, rank: int) -> list[Waiting]:
        sources = [int(source) for source in np.flatnonzero(self.wanted[rank])]
        if self.first_sender(rank, sources) is not None:
            return []
        what = f"to send {self.ranks[rank]['any_what'].decode()}"
        return [Waiting(rank, source, RECV_ANY, what, any_of=True) for source in sources]

    def waits_for(self, rank: int, peer: int) -> bool:
        """Whether ``rank`` is in an operation that ``peer`` takes part in."""
        slot = self.ranks[rank]
        peers = int(slot["dst"]), int(slot["src"])
        if not slot["op"]:
            return False
        if peers != (-1, -1):
            return peer in peers
        return slot["op"].decode() != RECV_ANY or bool(self.wanted[rank, peer])

    def _open(self, side: int, source: int, destination: int) -> bool:
        edge = (source, destination)
        return bool(self._count[(1 - side, *edge)] < self._count[(side, *edge)])

    def _last(self, side: int, source: int, destination: int) -> str:
        edge = (side, source, destination)
        return self._what[edge][(int(self._count[edge]) - 1) % _DEPTH].decode()

    def stuck(self) -> list[int]:
        """The ranks that can never go on, whatever the others do.

        A rank that computes may still come to any meeting; one that has returned never will. So a
        rank is stuck when it waits for a rank that has returned, or for another stuck rank; where
        any of several would do, when that holds for all of them. (Who waits for a lost rank is
        told so, and goes on.)
        """
        everyone = range(self.world_size)
        ended = {rank for rank in everyone if self.ranks[rank]["state"] == RETURNED}
        waits = {rank: self.waits(rank) for rank in everyone if rank not in ended}
        # A cycle has no first member: start from "all that wait", and free those that can go on.
        waiting = {rank for rank, reasons in waits.items() if reasons}
        freed = True
        while freed:
            freed = {rank for rank in waiting if _can_go_on(waits[rank], waiting | ended)}
            waiting -= freed
        return sorted(waiting)

    def ticks(self) -> tuple[int, ...]:
        """A fingerprint of the ranks' progress: unchanged means that none has moved on."""
        return tuple(int(value) for value in self.ranks["ticks"])


def _can_go_on(reasons: list[Waiting], hopeless: set[int]) -> bool:
    hopes = [reason.peer not in hopeless for reason in reasons]
    return any(hopes) if reasons[0].any_of else all(hopes)
