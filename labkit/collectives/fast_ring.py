"""The fast ring: the timetable of ``labkit.collectives.ring``, in segments that stay in cache.

``ring_all_reduce`` moves a whole chunk, then adds it, then moves the next: with large tensors each
of these passes goes through main memory. Here the loop over segments is the outer one. Each chunk
is cut into segments; segment g of all P chunks makes a column, and the whole timetable runs for
one column before the next. An incoming segment is read directly from the neighbour's memory, and
the sum is written directly into the slot from which the next rank reads it.

Chunks, order of additions, messages and bytes are those of the readable ring, so the result is the
same to the bit. Source of the pipelining: Baidu's and gloo's ``allreduce_ring_chunked``.

Symbols: P ranks, S bytes, a column = P segments of up to the channel's ``segment_bytes``.
"""

from functools import cache
from itertools import zip_longest

import torch
from torch import Tensor

from labkit.collectives.common import Reduction, in_place
from labkit.collectives.ring import ring_all_reduce, split_chunks
from labkit.engine.comm.comm import Comm, SubComm
from labkit.schedules.ring import RingStep, ring_all_reduce as ring_steps


def fast_ring_all_reduce(comm: Comm, tensor: Tensor, op: str = "sum") -> Tensor:
    """Reduce ``tensor`` over all ranks, in place, pipelined through shared memory.

    Over other transports, or some ranks alone, it is ``ring_all_reduce`` itself. Arguments,
    messages and bytes as there; a message is a chunk, however many segments.
    """
    streams = comm.transport.shares_memory and not isinstance(comm, SubComm)
    if not streams or comm.world_size == 1:
        return ring_all_reduce(comm, tensor, op)
    reduction = Reduction.of(op, tensor)
    with (
        in_place(tensor) as flat,
        comm.collective("fast_ring_all_reduce", tensor, op),
        comm.session.streaming(
            "fast_ring_all_reduce", (comm.rank + 1) % comm.world_size, kind="all_reduce"
        ),
    ):
        _run(comm, reduction, flat)
    return tensor


# In a small all-reduce the bookkeeping takes most of the time: the timetable is made only once.
@cache
def _steps(rank: int, world_size: int) -> list[tuple[RingStep, RingStep | None]]:
    """Pair each step of the timetable with the one that follows it."""
    steps = list(ring_steps(rank, world_size))
    return list(zip_longest(steps, steps[1:]))


def _run(comm: Comm, reduction: Reduction, flat: Tensor) -> None:
    """Run the timetable: a segment that arrives in one step is sent at the end of that step.

    The first send of a column needs nothing from the left neighbour. The last step sends nothing;
    there the following column begins, so that no rank waits.
    """
    steps = _steps(comm.rank, comm.world_size)
    wide = reduction.wide
    first, _ = steps[0]
    right, left = comm.transport.channel_to(first.dst), comm.transport.channel_from(first.src)
    chunks = split_chunks(flat, comm.world_size)
    segments = [chunk.split(right.segment_bytes // wide.itemsize) for chunk in chunks]
    columns = list(zip_longest(*segments, fillvalue=flat[:0]))
    # A message is a chunk, so it begins with the chunk's segment in the first column.
    begins_message = True

    def put(segment: Tensor, dtype: torch.dtype) -> None:
        right.reserve(segment.numel(), dtype).copy_(segment)
        right.commit(begins_message)

    put(columns[0][first.send_chunk], wide)
    for column, following_column in zip_longest(columns, columns[1:]):
        for step, following in steps:
            segment = column[step.recv_chunk]
            if following is None:
                begins_message = False
                if following_column is not None:
                    put(following_column[first.send_chunk], wide)
            if step.phase == "share_only":
                segment.copy_(left.arrive(segment.numel(), segment.dtype))
            else:
                incoming = left.arrive(segment.numel(), wide)
                if following and following.phase == "share_reduce":
                    # Only the next rank needs this partial sum: write it into the outgoing slot.
                    outgoing = right.reserve(segment.numel(), wide)
                    reduction.combine(segment, incoming, outgoing)
                    right.commit(begins_message)
                    left.release()
                    continue
                # The last partial sum: the segment is now complete on this rank, its owner.
                total = segment if segment.dtype == wide else torch.empty_like(incoming)
                reduction.finish(reduction.combine(segment, incoming, total), comm.world_size)
                if total is not segment:
                    segment.copy_(total)
            left.release()
            if following:
                put(segment, segment.dtype)
