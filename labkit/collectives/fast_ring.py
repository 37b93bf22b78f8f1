"""The fast ring: the timetable of ``labkit.collectives.ring``, in segments that stay in cache.

``ring_all_reduce`` moves a whole chunk, then adds it, then moves the next: with large tensors each
of these passes goes through main memory. Here the loop over segments is the outer one. Each chunk
is cut into segments; segment g of all P chunks makes a column, and the whole timetable runs for
one column before the next. An incoming segment is read directly from the neighbour's memory, and
the sum is written directly into the slot from which the next rank reads it.

Chunks, order of additions, messages and bytes are those of the readable ring, so the result is the
same to the bit. Source of the pipelining: Baidu's and gloo's ``allreduce_ring_chunked``.

Symbols: P ranks, S bytes, a column = P segments of up to the channel's ``segment_bytes``
(512 KiB between CPU ranks, 4 MiB between GPU ranks).
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import zip_longest

import torch
from torch import Tensor

from labkit.collectives.common import in_place
from labkit.collectives.reduction import Reduction
from labkit.collectives.ring import ring_all_reduce, split_chunks
from labkit.comm.comm import Comm
from labkit.schedules.ring import RingStep, ring_all_reduce as ring_steps


def fast_ring_all_reduce(comm: Comm, tensor: Tensor, op: str = "sum") -> Tensor:
    """Reduce ``tensor`` over all ranks, in place, pipelined through shared memory.

    Over other transports it is ``ring_all_reduce`` itself.

    Args:
        tensor: any shape and size, equal on every rank; reduced in place and returned.
        op: ``sum``, ``mean``, ``max`` or ``min``.

    Messages and bytes: as ``ring_all_reduce``; a message is a chunk, however many segments.

    Raises:
        ValueError: ``op`` does not suit the tensor's dtype.
        MismatchError: another rank calls another collective, or with another tensor.
    """
    if not comm.transport.shares_memory or comm.world_size == 1:
        return ring_all_reduce(comm, tensor, op)
    reduction = Reduction.of(op, tensor)
    ring = Ring(comm, reduction, _steps(comm.rank, comm.world_size))
    with (
        in_place(tensor) as flat,
        comm.collective("fast_ring_all_reduce", tensor, op),
        comm.span("all_reduce"),
        comm.session.streaming("fast_ring_all_reduce", ring.dst),
    ):
        ring.run(ring.columns(split_chunks(flat, comm.world_size)))
    return tensor


# In a small all-reduce the bookkeeping takes most of the time: the timetable is made only once.
@lru_cache(maxsize=64)
def _steps(rank: int, world_size: int) -> list[tuple[RingStep, RingStep | None]]:
    return with_following(ring_steps(rank, world_size))


def with_following(steps: Iterable[RingStep]) -> list[tuple[RingStep, RingStep | None]]:
    """Each step of a timetable with the one that follows it."""
    steps = list(steps)
    return list(zip_longest(steps, steps[1:]))


class Ring:
    """This rank's place in a ring: a channel to the right, one from the left, the timetable.

    Args:
        steps: a whole timetable or half of one, at least one step, with ranks of ``comm``.
    """

    def __init__(
        self, comm: Comm, reduction: Reduction, steps: list[tuple[RingStep, RingStep | None]]
    ):
        self.world_size = comm.world_size
        self.steps = steps
        first = self.steps[0][0]
        self.dst = first.dst
        self.right = comm.transport.channel_to(first.dst)
        self.left = comm.transport.channel_from(first.src)
        self.reduction = reduction
        # A message is a chunk, so it begins with the chunk's segment in the first column.
        self.begins_messages = True
        self.segment_elements = self.right.segment_bytes // reduction.wide.itemsize

    def columns(self, chunks: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """The chunks in segments: segment g of all P chunks is column g."""
        segments = [chunk.split(self.segment_elements) for chunk in chunks]
        return list(zip_longest(*segments, fillvalue=chunks[0][:0]))

    def run(self, columns: Sequence[tuple[Tensor, ...]]) -> None:
        """Run the timetable, column by column. What is run later belongs to the same messages."""
        self.begin(columns[0])
        for column, following in zip_longest(columns, columns[1:]):
            self.reduce_column(column, following)
        self.begins_messages = False

    def begin(self, segments: tuple[Tensor, ...]) -> None:
        """Send the first of a column's P segments, which needs nothing from the left neighbour."""
        first, _ = self.steps[0]
        mine = segments[first.send_chunk]
        self.put(mine, self.reduction.wide if first.phase == "share_reduce" else mine.dtype)

    def reduce_column(
        self, segments: tuple[Tensor, ...], following_column: tuple[Tensor, ...] | None
    ) -> None:
        """Run the timetable on a column of P segments, the first of which ``begin`` has sent.

        A segment that arrives in one step is sent in the next, so each step ends by sending it.
        The last step sends nothing; there the following column begins, so that no rank waits.
        """
        wide = self.reduction.wide
        for step, following in self.steps:
            mine = segments[step.recv_chunk]
            if following is None and following_column is not None:
                self.begins_messages = False
                self.begin(following_column)
            if step.phase == "share_only":
                incoming = self.left.arrive(mine.numel(), mine.dtype)
                mine.copy_(incoming)
            else:
                incoming = self.left.arrive(mine.numel(), wide)
                if following and following.phase == "share_reduce":
                    # Only the next rank needs this partial sum: write it into the outgoing slot.
                    slot = self.right.reserve(mine.numel(), wide)
                    self.reduction.combine(mine, incoming, slot)
                    self.right.commit(self.begins_messages)
                    self.left.release()
                    continue
                self.complete(mine, incoming)
            self.left.release()
            if following:
                self.put(mine, mine.dtype)

    def complete(self, mine: Tensor, incoming: Tensor) -> None:
        """Add the last partial sum: the segment is now complete on this rank, its owner."""
        total = mine if mine.dtype == incoming.dtype else torch.empty_like(incoming)
        self.reduction.combine(mine, incoming, total)
        self.reduction.finish(total, self.world_size)
        if total is not mine:
            mine.copy_(total)

    def put(self, segment: Tensor, dtype: torch.dtype) -> None:
        """Send ``segment`` to the right neighbour as ``dtype``."""
        self.right.reserve(segment.numel(), dtype).copy_(segment)
        self.right.commit(self.begins_messages)
