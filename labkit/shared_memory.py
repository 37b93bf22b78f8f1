"""Shared memory between the ranks of one machine: the fast way for bytes to travel.

An arena is one piece of memory that all ranks map: the status board, and for every edge (source ->
destination) a channel of a few slots. The sender copies a segment of its tensor into a free slot;
the receiver reads it there, or adds straight out of it, and the slot is free again. Counting
semaphores, a few an edge, say who may go on. A segment is small enough to stay in the cache from
the copy to the reduction.

The arena has no name in any file system, so nothing is left behind however its processes end.

Symbols: P ranks; an edge is an ordered pair (source, destination).
"""

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import DupFd

import torch
from torch import Tensor

from labkit.board import LEFT, LOST, Board
from labkit.errors import PeerLostError
from labkit.processes import is_running
from labkit.transports import Sent, Transport, as_bytes

SEGMENT_BYTES = 512 * 1024
NUM_SLOTS = 4
# More than any sem_t, and a cache line of its own, so that two ranks never write to one line.
_SEMAPHORE_BYTES = 64
_KINDS = ("ready", "filled", "free", "met")
_PAGE_BYTES = 4096

# How long a rank looks again and again before it sleeps: waking up takes about as long. Between
# looks it offers its core to others, since the peer may be waiting for that very core.
_SPIN_S = 200e-6
# How often a sleeping rank looks whether its peer is still alive.
_LOOK_S = 0.1
# With two sides of an exchange open, neither may be waited for to the end: they take turns, which
# grow with the time waited, so that a long wait does not keep a core busy.
_TURN_S = 0.3e-3
_LONGEST_TURN_S = 10e-3


class Arena:
    """The memory that P ranks of one machine share.

    Args:
        world_size: P.
        descriptor: an open file that holds the arena; None makes a new one.
    """

    def __init__(self, world_size: int, descriptor: int | None = None):
        self.world_size = world_size
        board_bytes = Board.num_bytes(world_size)
        # Those of the edges, then a doorbell a rank.
        self.has_semaphores = sys.platform.startswith("linux")
        num_edge_semaphores = len(_KINDS) * world_size**2 if self.has_semaphores else 0
        num_semaphores = num_edge_semaphores + (world_size if self.has_semaphores else 0)
        self._semaphores_at = _round_up(board_bytes, _SEMAPHORE_BYTES)
        self._slots_at = _round_up(
            self._semaphores_at + num_semaphores * _SEMAPHORE_BYTES, _PAGE_BYTES
        )
        # Pages that no rank touches take no memory: only the edges in use do.
        self.num_bytes = self._slots_at + world_size**2 * NUM_SLOTS * SEGMENT_BYTES
        self.descriptor = _unnamed_file(self.num_bytes) if descriptor is None else descriptor
        self._map = mmap.mmap(self.descriptor, self.num_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.board = Board(world_size, memoryview(self._map)[:board_bytes])
        if descriptor is None:
            for number in range(num_semaphores):
                is_free = number % len(_KINDS) == _KINDS.index("free")
                initial = NUM_SLOTS if is_free and number < num_edge_semaphores else 0
                Semaphore(self._semaphore_address(number)).initialise(initial)

    def __reduce__(self):
        # To a process that is being started, an open file travels as a duplicate.
        return _from_duplicate, (self.world_size, DupFd(self.descriptor))

    def __del__(self):
        with contextlib.suppress(AttributeError):
            self.close_file()

    def close_file(self) -> None:
        """The memory stays; nobody else can open it any more."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def close(self) -> None:
        """Give the memory back, as soon as nobody here looks at the board any more."""
        self.close_file()
        del self.board, self._bytes, self._map

    def semaphores(self, source: int, destination: int) -> list["Semaphore"]:
        """Those of an edge: ready (to receive), filled, free (slots), met (at a barrier)."""
        first = len(_KINDS) * (source * self.world_size + destination)
        return [Semaphore(self._semaphore_address(first + n)) for n in range(len(_KINDS))]

    def doorbell(self, rank: int) -> "Semaphore":
        """What senders ring before they wait for ``rank`` to receive."""
        return Semaphore(self._semaphore_address(len(_KINDS) * self.world_size**2 + rank))

    def slots(self, source: int, destination: int) -> list[Tensor]:
        """The slots of an edge, each [SEGMENT_BYTES] bytes."""
        edge = source * self.world_size + destination
        start = self._slots_at + edge * NUM_SLOTS * SEGMENT_BYTES
        end = start + NUM_SLOTS * SEGMENT_BYTES
        return list(self._bytes[start:end].split(SEGMENT_BYTES))

    def _semaphore_address(self, number: int) -> int:
        return self._address + self._semaphores_at + number * _SEMAPHORE_BYTES


def _from_duplicate(world_size: int, duplicate) -> Arena:
    arena = Arena(world_size, duplicate.detach())
    arena.close_file()
    return arena


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _unnamed_file(num_bytes: int) -> int:
    """A file in memory that no folder lists. Neither the size of /dev/shm limits it."""
    if hasattr(os, "memfd_create"):
        # The system gives such a file to all who reach it, and may let it grow and shrink.
        descriptor = os.memfd_create("labkit", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(descriptor, 0o600)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, num_bytes)
    return descriptor


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Semaphore:
    """A POSIX semaphore in shared memory: a counter that a process can sleep on.

    Source: POSIX.1-2017, sem_init (process-shared), sem_post, sem_trywait, sem_timedwait.
    """

    _libc: ctypes.CDLL | None = None

    def __init__(self, address: int):
        if Semaphore._libc is None:
            Semaphore._libc = ctypes.CDLL(None)
        self._address = ctypes.c_void_p(address)
        self._post, self._trywait = self._libc.sem_post, self._libc.sem_trywait

    def initialise(self, value: int) -> None:
        shared_between_processes = 1
        failed = self._libc.sem_init(self._address, shared_between_processes, value)
        assert not failed

    def post(self) -> None:
        self._post(self._address)

    def try_wait(self) -> bool:
        return not self._trywait(self._address)

    def wait(self, timeout_s: float) -> bool:
        """Sleep until the counter is above 0, and take one; False when the time is over."""
        until_s = time.time() + timeout_s
        timespec = _Timespec(int(until_s), int(until_s % 1 * 1e9))
        return not self._libc.sem_timedwait(self._address, ctypes.byref(timespec))


class Doorbells:
    """How a rank sleeps until any other has something to send to it.

    Who sends posts it on the board, then rings; who waits looks at the board, then sleeps until it
    rings. Rings nobody has waited for add up, and at worst let a later sleeper look in vain.

    Args:
        arena: of this machine's ranks, with semaphores.
        rank: whose bell ``wait`` listens to.
        timeout_s: the longest wait for a message.
    """

    def __init__(self, arena: Arena, rank: int, timeout_s: float = float("inf")):
        self._board = arena.board
        self._bells = [arena.doorbell(other) for other in range(arena.world_size)]
        self._rank = rank
        self._timeout_s = timeout_s
        self._looked_s = time.monotonic()

    def ring(self, rank: int) -> None:
        self._bells[rank].post()

    def wait_for_sender(self, sources: list[int]) -> int:
        """The source whose message has waited longest; sleeps until there is one.

        Raises:
            PeerLostError: a source has ended without one, or none came in ``timeout_s``.
        """
        started_s = time.monotonic()
        while True:
            source = self._board.first_sender(self._rank, sources)
            now_s = time.monotonic()
            # Even if others keep coming: one that has ended must not go unnoticed till the end.
            if now_s - self._looked_s > _LOOK_S:
                self._looked_s = now_s
                self._look_for_losses(sources, now_s - started_s)
            if source is not None:
                return source
            self._bells[self._rank].wait(_LOOK_S)

    def _look_for_losses(self, sources: list[int], waited_s: float) -> None:
        for source in sources:
            lost = self._board.gave_up() or why_gone(self._board, source)
            # What it posted before its end counts: then the transfer finds out.
            if lost and self._board.first_sender(self._rank, [source]) is None:
                raise PeerLostError(lost, rank=source)
        if waited_s > self._timeout_s:
            raise PeerLostError(f"nothing from ranks {sources} in {self._timeout_s:g} s")


class Channel:
    """One edge, as one of its two ends sees it: the sender fills slots, the receiver empties them.

    ``reserve`` and ``commit`` are the sender's, ``arrive`` and ``release`` the receiver's. Between
    the two calls the slot belongs to the caller.
    """

    segment_bytes = SEGMENT_BYTES

    def __init__(self, transport: "SharedTransport", source: int, destination: int):
        arena = transport.arena
        self.ready, self.filled, self.free, _ = arena.semaphores(source, destination)
        self._peer = destination if transport.rank == source else source
        self._wait = transport.wait
        self._slots = arena.slots(source, destination)
        self._views: dict = {}
        self._next = 0
        # The receiving end counts nothing.
        self._sent = transport.sent.to[destination] if transport.rank == source else Sent()
        self._slot_bytes = 0

    def reserve(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The next free slot, as a tensor [num_elements] of ``dtype``; may wait."""
        self._wait(self.free, self._peer)
        return self.writable(num_elements, dtype)

    def commit(self, begins_message: bool = True) -> None:
        """The slot holds its segment, the first of a message or a later one: it is sent."""
        self._sent.count(self._slot_bytes, begins_message)
        self._next = (self._next + 1) % NUM_SLOTS
        self.filled.post()

    def arrive(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The next filled slot, in the same terms; may wait."""
        self._wait(self.filled, self._peer)
        return self.readable(num_elements, dtype)

    def release(self) -> None:
        """The slot is read: the sender may have it back."""
        self._next = (self._next + 1) % NUM_SLOTS
        self.free.post()

    def opening(self) -> Iterator[Semaphore]:
        """What the receiver needs before its first segment: nothing, the arena is there."""
        return iter(())

    def writable(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The slot, for a sender who has taken ``free``."""
        return self.slot(num_elements, dtype)

    def readable(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The slot, for a receiver who has taken ``filled``."""
        return self.slot(num_elements, dtype)

    def slot(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        self._slot_bytes = num_elements * dtype.itemsize
        key = self._next, num_elements, dtype
        if key not in self._views:
            if len(self._views) > 64:
                self._views.clear()
            self._views[key] = self._slots[self._next].view(dtype)[:num_elements]
        return self._views[key]


@dataclass
class _Side:
    """One half of an exchange under way: ``steps`` yields each semaphore it needs to go on."""

    peer: int
    steps: Iterator[Semaphore]
    needs: Semaphore | None = None

    def go_on(self) -> None:
        self.needs = next(self.steps, None)


class SharedTransport(Transport):
    """Point-to-point through an arena: ranks of one machine, tensors on the CPU.

    A send ends only when its receive has begun, as over gloo: a program that deadlocks on one
    transport deadlocks on the other, and the board explains it on both.

    Args:
        arena: of this machine's ranks.
        rank: this rank.
        timeout_s: the longest wait for one segment.
    """

    shares_memory = True

    def __init__(self, arena: Arena, rank: int, timeout_s: float = float("inf")):
        super().__init__()
        self.arena = arena
        self.rank = rank
        self.timeout_s = timeout_s
        self._channels: dict[tuple[int, int], Channel] = {}
        self._abandoned = False
        arena.board.ranks[rank]["pid"] = os.getpid()

    def send(self, tensor: Tensor, dst: int) -> None:
        self._drive([_Side(dst, self._sending(tensor, dst))])

    def recv(self, tensor: Tensor, src: int) -> None:
        self._drive([_Side(src, self._receiving(tensor, src))])

    def recv_add(self, tensor: Tensor, src: int) -> None:
        self._drive([_Side(src, self._adding(tensor, src))])

    def exchange(self, send: Tensor, dst: int, recv: Tensor, src: int) -> None:
        incoming = _Side(src, self._receiving(recv, src))
        self._drive([_Side(dst, self._sending(send, dst)), incoming])

    def barrier(self) -> None:
        """Dissemination, ceil(log2 P) rounds: in round k a rank meets those 2^k to either side."""
        distance = 1
        while distance < self.arena.world_size:
            right = (self.rank + distance) % self.arena.world_size
            left = (self.rank - distance) % self.arena.world_size
            # Not a message: one that is under way must never meet a barrier.
            *_, met_right = self.arena.semaphores(self.rank, right)
            *_, met_left = self.arena.semaphores(left, self.rank)
            met_right.post()
            self.wait(met_left, left)
            distance *= 2

    def channel_to(self, dst: int) -> Channel:
        return self._channel(self.rank, dst)

    def channel_from(self, src: int) -> Channel:
        return self._channel(src, self.rank)

    def _channel(self, source: int, destination: int) -> Channel:
        edge = source, destination
        if edge not in self._channels:
            self._channels[edge] = self._new_channel(source, destination)
        return self._channels[edge]

    def _new_channel(self, source: int, destination: int) -> Channel:
        return Channel(self, source, destination)

    def close(self) -> None:
        self._channels.clear()

    def set_timeout(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s

    def abandon(self) -> None:
        self._abandoned = True

    def _sending(self, tensor: Tensor, dst: int) -> Iterator[Semaphore]:
        channel = self.channel_to(dst)
        yield channel.ready
        begins_message = True
        for segment in _segments(as_bytes(tensor), channel.segment_bytes):
            yield channel.free
            channel.writable(segment.numel(), torch.uint8).copy_(segment)
            channel.commit(begins_message)
            begins_message = False

    def _receiving(self, tensor: Tensor, src: int) -> Iterator[Semaphore]:
        channel = self.channel_from(src)
        channel.ready.post()
        yield from channel.opening()
        for segment in _segments(as_bytes(tensor), channel.segment_bytes):
            yield channel.filled
            segment.copy_(channel.readable(segment.numel(), torch.uint8))
            channel.release()

    def _adding(self, tensor: Tensor, src: int) -> Iterator[Semaphore]:
        channel = self.channel_from(src)
        channel.ready.post()
        yield from channel.opening()
        for segment in _segments(tensor.view(-1), channel.segment_bytes // tensor.itemsize):
            yield channel.filled
            segment += channel.readable(segment.numel(), segment.dtype)
            channel.release()

    def _drive(self, sides: list[_Side]) -> None:
        """Let every side go on whenever it can, until all have ended."""
        for side in sides:
            side.go_on()
        sides = [side for side in sides if side.needs]
        while len(sides) > 1:
            able = [side for side in sides if side.needs.try_wait()]
            if not able:
                able = [self._first_able(sides)]
            for side in able:
                side.go_on()
            sides = [side for side in sides if side.needs]
        for side in sides:
            while side.needs:
                self.wait(side.needs, side.peer)
                side.go_on()

    def _first_able(self, sides: list[_Side]) -> _Side:
        started_s = looked_s = time.monotonic()
        while True:
            now_s = time.monotonic()
            waited_s = now_s - started_s
            turn_s = min(max(_TURN_S, waited_s / 100), _LONGEST_TURN_S)
            for side in sides:
                if side.needs.try_wait():
                    return side
                if waited_s > _SPIN_S and side.needs.wait(turn_s):
                    return side
            os.sched_yield()
            if now_s - looked_s > _LOOK_S:
                looked_s = now_s
                for side in sides:
                    if self._came_after_all(side.needs, side.peer, waited_s):
                        return side

    def wait(self, semaphore: Semaphore, peer: int) -> None:
        """Take one from a semaphore that ``peer`` posts.

        Raises:
            PeerLostError: the peer's process has ended, or nothing came in ``timeout_s``.
        """
        if semaphore.try_wait():
            return
        started_s = time.monotonic()
        while time.monotonic() - started_s < _SPIN_S:
            if semaphore.try_wait():
                return
            os.sched_yield()
        while not semaphore.wait(_LOOK_S):
            if self._came_after_all(semaphore, peer, time.monotonic() - started_s):
                return

    def _came_after_all(self, semaphore: Semaphore, peer: int, waited_s: float) -> bool:
        """False while there is hope; PeerLostError when there is none."""
        lost = self._why_lost(peer, waited_s)
        if not lost:
            return False
        # What the peer sent before its end counts.
        if semaphore.try_wait():
            return True
        raise PeerLostError(lost + self.arena.board.compared(self.rank, peer), rank=peer)

    def _why_lost(self, peer: int, waited_s: float) -> str:
        board = self.arena.board
        if self._abandoned:
            return "this rank is at its end"
        if lost := board.gave_up() or why_gone(board, peer):
            return lost
        if waited_s > self.timeout_s:
            return f"nothing from rank {peer} in {self.timeout_s:g} s"
        return ""


def _segments(flat: Tensor, most: int) -> Sequence[Tensor]:
    """``flat`` [n] in pieces of ``most`` elements or less."""
    # To split a small message would take longer than to copy it.
    return flat.split(most) if flat.numel() > most else (flat,)


def why_gone(board: Board, peer: int) -> str:
    """Why nothing more will come from ``peer``; empty while it may."""
    pid, state = int(board.ranks[peer]["pid"]), int(board.ranks[peer]["state"])
    if state == LEFT:
        return f"rank {peer} has left: its process group is destroyed, or it is at its end"
    if state == LOST or (pid and not is_running(pid)):
        return f"the process of rank {peer} (pid {pid}) has ended"
    return ""
