"""An emulated link: messages take the time that they would take on a slower network.

Every rank has one network card, which sends and receives at the same time. A message takes
latency + bytes / bandwidth (``labkit.costs.link``), from the moment when both ranks have come to
it, and occupies the sender's outgoing and the receiver's incoming side for that time. Messages of
one rank queue up on each side, whichever ranks they go to or come from. A rank waits for the end
of its message asleep, so the cores are free for other threads.

With ``ranks_per_host`` the ranks stand on emulated hosts. Messages inside a host are as fast as
they are, and all ranks of a host share one card: there only bytes queue up, and latencies overlap.

Not modeled: buffers, packets, switches, losses, barriers. The real transfer still takes place,
and its time is added.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from labkit.engine.comm.comm import Comm
from labkit.engine.comm.shared_memory import HAS_SEMAPHORES, Arena, Semaphore
from labkit.engine.errors import PeerLostError
from labkit.schedules.ring import Hosts, host_of
from labkit.units import MOST_RANKS, MOST_SECONDS, check_above_zero, check_integer, check_number

_INFINITE = float("inf")
# Booking takes microseconds.
_LOCK_PATIENCE_S = 5.0


@dataclass(frozen=True)
class EmulatedLink:
    """The link of each rank: ``labkit.run(fn, world_size=4, link=EmulatedLink(0.01, 12.5e6))``.

    Attributes:
        latency_s: seconds that every message takes, even an empty one.
        bandwidth_bytes_per_s: bytes per second, in each direction; infinite if left out.
        ranks_per_host: ranks on each emulated host, fewer on the last one if they do not divide;
            only messages between hosts take the time above. None: all messages do.
    """

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = _INFINITE
    ranks_per_host: int | None = None

    def __post_init__(self) -> None:
        check_number("latency_s", self.latency_s, MOST_SECONDS)
        check_above_zero("bandwidth_bytes_per_s", self.bandwidth_bytes_per_s, _INFINITE)
        if self.ranks_per_host is not None:
            check_integer("ranks_per_host", self.ranks_per_host, 1, MOST_RANKS)

    def __str__(self) -> str:
        """Write it as in ``labkit train --link``, which reads the same numbers from it."""
        text = f"{self.latency_s}s"
        if self.bandwidth_bytes_per_s < _INFINITE:
            text += f",{self.bandwidth_bytes_per_s}B/s"
        if self.ranks_per_host is not None:
            text += f",{self.ranks_per_host} per host"
        return text

    def hosts(self, world_size: int) -> Hosts:
        """Return the ranks of each emulated host; one host where none are emulated."""
        size = self.ranks_per_host or world_size
        firsts = range(0, world_size, size)
        return tuple(tuple(range(first, min(first + size, world_size))) for first in firsts)

    def message_seconds(self, num_bytes: float) -> float:
        """Return the seconds that one message of ``num_bytes`` takes."""
        return self.latency_s + num_bytes / self.bandwidth_bytes_per_s


def check_link(link: object) -> None:
    """Raise ValueError for what is neither None nor an ``EmulatedLink``."""
    if link is not None and not isinstance(link, EmulatedLink):
        raise ValueError(
            f"link must be a labkit.EmulatedLink, such as EmulatedLink(latency_s=0.01, "
            f"bandwidth_bytes_per_s=1e8), got {link!r}"
        )


class Card:
    """A network card: until when each of its two sides is busy.

    ``shared`` is the state of both sides [2], float64, and its lock, in memory that the ranks of
    an emulated host share; None for a card of this process alone.
    """

    def __init__(self, link: EmulatedLink, shared: tuple[Tensor, Semaphore] | None = None):
        self.link = link
        self.free_s, self._lock_of_ranks = shared or (torch.zeros(2, dtype=torch.float64), None)
        # Several threads may send or receive, each on a connection to another rank.
        self._lock_of_threads = threading.Lock()

    def book(
        self, now_s: float, out_bytes: int | None = None, in_bytes: int | None = None
    ) -> float:
        """Put a message of so many bytes on a side, or one on each; None for no message there.

        Returns when the later of the two ends.
        """
        lock = self._lock_of_ranks
        latency_s = self.link.latency_s
        end_s = now_s
        with self._lock_of_threads:
            if lock is not None and not lock.wait(_LOCK_PATIENCE_S):
                raise PeerLostError("a rank of this host ended while it used the host's card")
            try:
                for side, num_bytes in enumerate((out_bytes, in_bytes)):
                    if num_bytes is not None:
                        free_s = max(now_s, self.free_s[side].item())
                        free_s += num_bytes / self.link.bandwidth_bytes_per_s
                        end_s = max(end_s, free_s + latency_s)
                        if lock is None:
                            # A card of one rank is busy during the latency, too.
                            free_s += latency_s
                        self.free_s[side] = free_s
            finally:
                if lock is not None:
                    lock.post()
        return end_s

    def carry(
        self,
        near: frozenset[int],
        sent: tuple[int, Tensor] | None,
        received: tuple[int, Tensor] | None,
        now_s: float,
    ) -> None:
        """Wait for the end of messages that began at ``now_s``, but not with ``near`` ranks."""
        out_bytes = in_bytes = None
        if sent is not None and sent[0] not in near:
            out_bytes = sent[1].nbytes
        if received is not None and received[0] not in near:
            in_bytes = received[1].nbytes
        if out_bytes is not None or in_bytes is not None:
            end_s = self.book(now_s, out_bytes, in_bytes)
            time.sleep(max(0.0, end_s - time.monotonic()))


# This process's card, and the emulated hosts of its run.
_card: Card | None = None
_hosts: Hosts | None = None


def plug_in(link: EmulatedLink | None, rank: int = 0, arena: Arena | None = None) -> None:
    """Give this process a card for ``link``, or take its card away: a rank has one card.

    ``arena`` is the memory that it shares with all others; ValueError if ``link`` has hosts, whose
    ranks share a card, and there is none.
    """
    global _card, _hosts
    _card = None if link is None else Card(link)
    _hosts = None
    if link is None or link.ranks_per_host is None:
        return
    if arena is None or not HAS_SEMAPHORES:
        raise ValueError(
            f"link {str(link)!r}: ranks_per_host emulates hosts on one machine, whose ranks share "
            "a lock in memory (on Linux). On several machines leave it out: they are hosts already"
        )
    _hosts = link.hosts(arena.world_size)
    _card = Card(link, arena.card(host_of(rank, _hosts)))


def over_link(comm: Comm, ranks: Sequence[int] | None = None) -> Comm:
    """Put ``comm`` on this process's emulated link and emulated hosts, if it has any; return it.

    Collectives that would write directly into shared memory then send messages. ``ranks`` are
    those of ``comm``, numbered as in the run, by default all.
    """
    near: frozenset[int] = frozenset()
    if _hosts is not None:
        ranks = ranks or range(comm.world_size)
        hosts = []
        for host in _hosts:
            members = tuple(number for number, rank in enumerate(ranks) if rank in host)
            if members:
                hosts.append(members)
        comm.hosts = tuple(hosts)
        near = frozenset(comm.hosts[comm.host])
    if _card is not None:
        comm.transport.carry = partial(_card.carry, near)
        comm.transport.shares_memory = False
    return comm
