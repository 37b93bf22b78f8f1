"""The fast ring: the timetable of ``labkit.collectives.ring``, in segments that stay in cache.

``ring_all_reduce`` moves a whole chunk, then adds it, then moves the next: with large tensors each
of these passes goes through main memory. Here the loop over segments is the outer one. Each chunk
is cut into segments; segment g of all P chunks makes a column, and the whole timetable runs for
one column before the next. An incoming segment is read directly from the neighbor's memory, and
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
from labkit.engine.comm.shared_transport import Channel
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
        comm.session.streaming("fast_ring_all_reduce", (comm.rank + 1) % comm.world_size),
    ):
        _run(comm, reduction, flat)
    return tensor


# In a small all-reduce the bookkeeping takes most of the time: the timetable is made only once.
@cache
def _steps(rank: int, world_size: int) -> list[RingStep]:
    return list(ring_steps(rank, world_size))


def _run(comm: Comm, reduction: Reduction, flat: Tensor) -> None:
    """Run the timetable: a segment that arrives in one step is sent at the end of that step.

    The first send of a column needs nothing from the left neighbor. The last step sends nothing;
    there the following column begins, so that no rank waits.
    """
    steps = _steps(comm.rank, comm.world_size)
    *partial_sums, last_sum = steps[: comm.world_size - 1]
    *gathers, last_gather = steps[comm.world_size - 1 :]
    wide = reduction.accumulate_dtype
    first = steps[0]
    right = comm.transport.channel_to(first.dst)
    left = comm.transport.channel_from(first.src)
    chunks = split_chunks(flat, comm.world_size)
    segments = [chunk.split(right.segment_bytes // wide.itemsize) for chunk in chunks]
    columns = list(zip_longest(*segments, fillvalue=flat[:0]))
    _send(right, columns[0][first.send_chunk], wide, begins_message=True)
    for number, column in enumerate(columns):
        # A message is a chunk, so it begins with the chunk's segment in the first column.
        begins_message = number == 0
        for step in partial_sums:
            # Only the next rank needs this partial sum: write it into the outgoing slot.
            segment = column[step.recv_chunk]
            incoming = left.arrive(segment.numel(), wide)
            reduction.combine(segment, incoming, right.reserve(segment.numel(), wide))
            right.commit(begins_message)
            left.release()
        # With the last addition the segment is complete on this rank, its owner.
        segment = column[last_sum.recv_chunk]
        incoming = left.arrive(segment.numel(), wide)
        total = segment if segment.dtype == wide else torch.empty_like(incoming)
        reduction.finish(reduction.combine(segment, incoming, total), comm.world_size)
        if total is not segment:
            segment.copy_(total)
        left.release()
        _send(right, segment, segment.dtype, begins_message)
        for step in gathers:
            segment = column[step.recv_chunk]
            segment.copy_(left.arrive(segment.numel(), segment.dtype))
            left.release()
            _send(right, segment, segment.dtype, begins_message)
        if number + 1 < len(columns):
            _send(right, columns[number + 1][first.send_chunk], wide, begins_message=False)
        segment = column[last_gather.recv_chunk]
        segment.copy_(left.arrive(segment.numel(), segment.dtype))
        left.release()


def _send(channel: Channel, segment: Tensor, dtype: torch.dtype, begins_message: bool) -> None:
    """Write a segment into the channel's next slot, in ``dtype``."""
    channel.reserve(segment.numel(), dtype).copy_(segment)
    channel.commit(begins_message)
