"""Channels: how a tensor travels through shared memory, in segments.

The sender copies a segment of its tensor into a free slot; the receiver copies or adds it directly
from the slot, which is then free again. A segment (``SEGMENT_BYTES``) is small enough to stay in
the cache from the copy to the reduction. A few slots (``NUM_SLOTS``) let the sender run ahead
while the receiver is busy; more slots would not fit into the cache.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from labkit.comm.sent import Sent
from labkit.comm.shared_memory import NUM_SLOTS, SEGMENT_BYTES, Arena, Semaphore


class Channel:
    """One edge, as one of its two ends sees it: the sender fills slots, the receiver empties them.

    The sender calls ``reserve`` and ``commit``, the receiver ``arrive`` and ``release``. Between
    the two calls the slot belongs to the caller.

    Args:
        wait: ``wait(semaphore, peer)`` decrements a semaphore; PeerLostError if the peer is lost.
        sent: the sender's counters; None at the receiving end, which counts nothing.
    """

    segment_bytes = SEGMENT_BYTES

    def __init__(
        self,
        arena: Arena,
        source: int,
        destination: int,
        wait: Callable[[Semaphore, int], None],
        sent: Sent | None,
    ):
        self.ready, self.filled, self.free, _ = arena.semaphores(source, destination)
        self.is_sender = sent is not None
        self._peer = destination if self.is_sender else source
        self._wait = wait
        self._slots = arena.slots(source, destination)
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._next = 0
        self._sent = sent or Sent()
        self._slot_bytes = 0

    def reserve(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The next free slot, as a tensor [num_elements] of ``dtype``; may wait."""
        self._wait(self.free, self._peer)
        return self.writable(num_elements, dtype)

    def commit(self, begins_message: bool = True) -> None:
        """Send the slot, which now holds the first segment of a message or a later one."""
        self._sent.count(self._slot_bytes, begins_message)
        self._next = (self._next + 1) % NUM_SLOTS
        self.filled.post()

    def arrive(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The next filled slot, as a tensor [num_elements] of ``dtype``; may wait."""
        self._wait(self.filled, self._peer)
        return self.readable(num_elements, dtype)

    def release(self) -> None:
        """Give the slot, which has been read, back to the sender."""
        self._next = (self._next + 1) % NUM_SLOTS
        self.free.post()

    def opening(self) -> Iterator[Semaphore]:
        """The semaphores to wait for before the first segment is received: none, on the CPU."""
        return iter(())

    def slot(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """The current slot, as a tensor [num_elements] of ``dtype``; does not wait."""
        self._slot_bytes = num_elements * dtype.itemsize
        key = self._next, num_elements, dtype
        if key not in self._views:
            if len(self._views) > 64:
                self._views.clear()
            self._views[key] = self._slots[self._next].view(dtype)[:num_elements]
        return self._views[key]

    # For a sender that already holds ``free``, and a receiver that already holds ``filled``.
    writable = readable = slot
