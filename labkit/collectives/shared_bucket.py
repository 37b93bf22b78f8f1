"""All-reduce of buckets that lie in memory which all ranks can read.

The ring copies every value into a slot, from which the next rank reads it. If the tensor itself
lies in shared memory, nobody has to copy it first: each rank reduces one P-th of the elements,
reading the others' where they are (reduce-scatter), and writes the results where the others need
them (all-gather). A rank loads and stores 2 S bytes in place of the ring's (7 - 5 / P) S. It sends
as many bytes as on the ring, 2 (P - 1) / P S, in as many messages.

Each sum is made once, in the order of the ranks: replicas are equal to the bit.

Symbols: P ranks, S bytes of one rank's bucket, N elements.
"""

import torch
from torch import Tensor

from labkit.collectives.common import COMBINE, Reduction
from labkit.collectives.fast_ring import fast_ring_all_reduce
from labkit.engine.comm.comm import Comm, SubComm
from labkit.engine.comm.shared_memory import SEGMENT_BYTES
from labkit.engine.comm.shared_transport import split_segments


class SharedBucket:
    """A tensor of zeros per rank, which ``all_reduce`` reduces in place.

    Where ranks do not share memory it is an ordinary tensor, reduced on the ring; so it is in
    16 bits, whose partial sums travel in 32. All ranks make it, and call ``all_reduce``, together.

    Args:
        comm: of all ranks, or of some (a ``SubComm``), which take the ring.
        num_elements: N, rounded up to a multiple of P.

    Attributes:
        flat: this rank's tensor [N].
    """

    def __init__(self, comm: Comm, num_elements: int, dtype: torch.dtype, device: torch.device):
        self._slice_size = -(-num_elements // comm.world_size)
        padded = self._slice_size * comm.world_size
        self._slice_bytes = self._slice_size * dtype.itemsize
        # By segment of this rank's slice, that segment of each rank's tensor.
        self._segments: list[tuple[Tensor, ...]] = []
        blocks: list[Tensor] = []
        is_reachable = comm.transport.shares_memory and not isinstance(comm, SubComm)
        adds_in_place = Reduction.of("sum", torch.empty(0, dtype=dtype)).accumulate_dtype == dtype
        if is_reachable and adds_in_place and comm.world_size > 1 and device.type == "cpu":
            size = f"{str(dtype).removeprefix('torch.')} [{num_elements}]"
            with (
                comm.collective("shared_bucket", option=size),
                comm.session.joint_operation("shared_bucket"),
            ):
                blocks = comm.transport.share(max(1, padded * dtype.itemsize)) or []
        if not blocks:
            self.flat = torch.zeros(padded, dtype=dtype, device=device)
            return
        tensors = [block[: padded * dtype.itemsize].view(dtype) for block in blocks]
        self.flat = tensors[comm.rank]
        start = comm.rank * self._slice_size
        segments_by_rank = []
        for tensor in tensors:
            values = tensor[start : start + self._slice_size]
            segments_by_rank.append(split_segments(values, SEGMENT_BYTES // dtype.itemsize))
        self._segments = list(zip(*segments_by_rank))

    def all_reduce(self, comm: Comm, op: str = "sum") -> None:
        """Reduce ``flat`` over all ranks, in place: 2 (P - 1) messages, 2 (P - 1) / P S bytes.

        Between ranks that share memory there are two steps. Errors as ``ring_all_reduce``.
        """
        if not self._segments:
            fast_ring_all_reduce(comm, self.flat, op)
            return
        reduction = Reduction.of(op, self.flat)
        combine = COMBINE[reduction.op]
        with (
            comm.collective("shared_all_reduce", self.flat, op),
            comm.session.streaming("shared_all_reduce"),
        ):
            barrier = comm.transport.windows.barrier
            for peer in range(comm.world_size):
                if peer != comm.rank:
                    # Its values of our slice, which it reads here, and our sums, which it gets.
                    sent = comm.transport.sent.to[peer]
                    sent.count(self._slice_bytes, begins_message=True)
                    sent.count(self._slice_bytes, begins_message=True)
            barrier()
            for segments in self._segments:
                total = segments[comm.rank]
                partial = segments[0]
                # This rank's own values may be needed until the last addition.
                scratch = torch.empty_like(total)
                for number, segment in enumerate(segments[1:], start=2):
                    out = total if number == len(segments) else scratch
                    partial = combine(partial, segment, out=out)
                reduction.finish(total, len(segments))
                for segment in segments:
                    if segment is not total:
                        segment.copy_(total)
            barrier()
