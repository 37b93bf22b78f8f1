"""All-reduce in one hop: every rank reads the others' values where they were written.

The ring takes 2 (P - 1) steps, and each waits for the one before. With a small tensor this waiting
is nearly all the time. Ranks that share memory need not pass values on: each shows its tensor to
all others, and adds up all P tensors by itself. Every rank then does all the additions, which the
ring divides among the ranks: large tensors are faster on the ring.

All ranks add in the order of the ranks, so the replicas are equal to the bit. (If each began with
its own values, the sums of three or more ranks would differ in their last bits, and with them the
replicas: floating-point addition is not associative.)

Libraries for inference on several GPUs call it the one-shot all-reduce.

Symbols: P ranks, S bytes of one rank's tensor.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from labkit.collectives.common import Reduction, in_place
from labkit.collectives.fast_ring import fast_ring_all_reduce
from labkit.engine.comm.comm import Comm, SubComm
from labkit.engine.comm.shared_transport import split_segments
from labkit.engine.comm.transport import check_tensor

# Up to here one hop is faster than the fast ring on 2 to 4 ranks (``labkit bench all-reduce``).
ONE_HOP_BYTES = 512 * 1024


def fast_all_reduce(comm: Comm, tensor: Tensor, op: str = "sum") -> Tensor:
    """Reduce ``tensor`` over all ranks, in place: in one hop if it is small, else on the ring.

    Small is up to ``ONE_HOP_BYTES``. Arguments and errors as ``ring_all_reduce``.
    """
    check_tensor(tensor)
    if tensor.nbytes <= ONE_HOP_BYTES:
        return direct_all_reduce(comm, tensor, op)
    return fast_ring_all_reduce(comm, tensor, op)


def direct_all_reduce(comm: Comm, tensor: Tensor, op: str = "sum") -> Tensor:
    """Reduce ``tensor`` over all ranks, in place, in one hop through shared memory.

    Steps 1, messages P - 1, bytes (P - 1) S on every rank. 16-bit floats travel as they are, and
    are added in float32. Over other transports, or some ranks alone, it is ``ring_all_reduce``.
    Arguments and errors as there.
    """
    reads_all = comm.transport.shares_memory and not isinstance(comm, SubComm)
    if not reads_all or comm.world_size == 1:
        return fast_ring_all_reduce(comm, tensor, op)
    reduction = Reduction.of(op, tensor)
    with (
        in_place(tensor) as flat,
        comm.collective("direct_all_reduce", tensor, op),
        comm.session.streaming("direct_all_reduce"),
    ):
        windows = comm.transport.windows
        segments = split_segments(flat, windows.window_bytes // flat.itemsize)
        windows.write(segments[0])
        for number, segment in enumerate(segments):
            # One ahead, so that no rank waits for the slowest in every segment.
            if number + 1 < len(segments):
                windows.write(segments[number + 1], begins_message=False)
            _reduce(reduction, windows.read(segment.numel(), segment.dtype), segment)
    return tensor


def _reduce(reduction: Reduction, tensors: Iterable[Tensor], out: Tensor) -> None:
    """Reduce the tensors of all ranks [n], in the order of the ranks, into ``out``."""
    total = out
    if out.dtype != reduction.accumulate_dtype:
        total = torch.empty_like(out, dtype=reduction.accumulate_dtype)
    tensors = iter(tensors)
    # (The sum of two 16-bit tensors would be rounded to 16 bits, whatever holds it.)
    partial = next(tensors).to(reduction.accumulate_dtype)
    world_size = 1
    for tensor in tensors:
        partial = reduction.combine(partial, tensor, total)
        world_size += 1
    reduction.finish(total, world_size)
    if total is not out:
        out.copy_(total)
