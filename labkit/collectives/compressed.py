"""All-reduce in fewer bytes: 16-bit floats on the wire, the largest elements, or sparse tensors.

The first two replace ``ring_all_reduce(comm, flat)`` for gradients. They give the same bits on
every rank, but not the exact sum.

Symbols: P ranks, N elements, k of them kept.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from labkit.collectives.common import Reduction
from labkit.collectives.hierarchical import (
    cut,
    fast_hierarchical_all_reduce,
    parts_of,
    rings_of,
)
from labkit.collectives.ring import (
    all_gather,
    phase,
    ring_all_reduce,
    share_only,
    share_reduce,
    split_chunks,
)
from labkit.engine.comm.comm import Comm, SubComm
from labkit.schedules.ring import ring_share_reduce

AllReduce = Callable[[Comm, Tensor], Tensor]


def all_reduce_of(compress: str | None, hierarchical: bool = False) -> AllReduce:
    """Return the all-reduce for ``--compress`` fp16, bf16 or topk; for None the exact ring.

    ``hierarchical`` compresses what travels between hosts, not ``topk``: inside them, sums are
    exact. Each call makes a new object, since ``topk`` keeps what it has not sent yet.
    """
    if compress is None:
        return fast_hierarchical_all_reduce if hierarchical else ring_all_reduce
    if hierarchical:
        return partial(half_between_hosts, HalfRing(compress))
    return TopK() if compress == "topk" else HalfRing(compress)


class HalfRing:
    """Ring all-reduce whose messages are 16-bit floats: half the bytes of float32.

    At each hop the receiver adds its own values to the incoming ones in the precision of ``flat``,
    and rounds the sum for the next hop. So a sum is rounded P times, and all ranks end with the
    rounded sum of the chunk's owner: the error is at most about P x 2^-11 of the largest partial
    sum for fp16, P x 2^-8 for bf16. In fp16 a sum above 65504 becomes infinite and one below 6e-8
    becomes 0; bf16 has the range of float32.

    Args:
        half: ``fp16`` or ``bf16``.
    """

    def __init__(self, half: str):
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[half]

    @torch.no_grad()
    def __call__(self, comm: Comm, flat: Tensor) -> Tensor:
        """Sum ``flat`` [N] over the ranks, in place, and return it. Messages 2 (P - 1)."""
        chunks = split_chunks(flat, comm.world_size)
        halves = split_chunks(torch.empty_like(flat, dtype=self.dtype), comm.world_size)
        with comm.span("compress"):
            # In step 0 a rank sends its own chunk; with one rank this is the sum.
            halves[comm.rank].copy_(chunks[comm.rank])
        with phase(comm, "share_reduce", chunks, f"as {self.dtype}"):
            for step in ring_share_reduce(comm.rank, comm.world_size):
                incoming = halves[step.recv_chunk]
                comm.exchange(halves[step.send_chunk], step.dst, incoming, step.src)
                incoming.copy_(chunks[step.recv_chunk] + incoming)
        share_only(comm, halves)
        with comm.span("compress"):
            for chunk, half in zip(chunks, halves):
                chunk.copy_(half)
        return flat


class TopK:
    """Sum the k elements of each rank that are largest in magnitude; keep the rest for later.

    What a rank does not send stays in its ``residual`` and is added to its next gradient (error
    feedback), so every element is sent sooner or later: without it, small gradients would never
    count. Ranks gather all values and indices, P k of each, and add them in the order of ranks.
    k is a ``fraction`` of N, rounded down, and at least 1.

    The residual is a sum of past gradients of this rank: gradients must not be rescaled between
    updates, and a NaN never leaves it. 16-bit floats are kept, sent and added up as float32.
    Sources: Stich et al. (2018), "Sparsified SGD with memory", algorithm 1; Lin et al. (2018),
    "Deep gradient compression", without its momentum correction.

    Attributes:
        residual: [N], the values not sent yet; None before the first call.
    """

    def __init__(self, fraction: float = 0.01) -> None:
        self.fraction = fraction
        self.residual: Tensor | None = None

    @torch.no_grad()
    def __call__(self, comm: Comm, flat: Tensor) -> Tensor:
        """Replace ``flat`` [N] by the sum of the elements that ranks send. Messages P - 1."""
        wide = Reduction.of("sum", flat).accumulate_dtype
        with comm.span("compress"):
            if self.residual is None:
                self.residual = torch.zeros_like(flat, dtype=wide)
            self.residual += flat
            # An empty gradient has no element to keep.
            kept = min(flat.numel(), max(1, int(self.fraction * flat.numel())))
            indices = self.residual.abs().topk(kept).indices
            values = self.residual[indices]
            self.residual[indices] = 0
            # One message, not two: the indices travel as integers of the values' size.
            integers = torch.int64 if wide == torch.float64 else torch.int32
            packed = torch.cat([values.view(integers), indices.to(integers)])
        packed_by_rank = all_gather(comm, packed)
        with comm.span("compress"):
            total = torch.zeros_like(flat, dtype=wide)
            for packed in packed_by_rank:
                values, indices = packed.chunk(2)
                total.index_add_(0, indices.long(), values.view(wide))
        return flat.copy_(total)


@torch.no_grad()
def half_between_hosts(half_ring: HalfRing, comm: Comm, flat: Tensor) -> Tensor:
    """Hierarchical all-reduce of ``flat`` [N] that rounds each sum once per host."""
    inside = SubComm(comm, comm.hosts[comm.host])
    with comm.collective("hierarchical_all_reduce", flat, f"as {half_ring.dtype}"):
        share_reduce(inside, parts_of(comm, flat))
        for ring, blocks in rings_of(comm):
            half_ring(ring, cut(comm, flat, blocks))
        share_only(inside, parts_of(comm, flat))
    return flat


def sparse_all_reduce(comm: Comm, tensor: Tensor, op: str = "sum") -> Tensor:
    """Add up a sparse COO ``tensor`` over all ranks, in place; it is coalesced. ``op``: "sum".

    Ranks gather the number of entries, their indices and their values, padded to the largest
    number, and add in the order of the ranks, so all end with the same bits. An entry may be
    missing on some ranks: so other reductions (ValueError) are not defined.
    """
    if tensor.layout != torch.sparse_coo or op != "sum":
        raise ValueError(
            f"cannot take the {op} of a {tensor.layout} tensor over ranks: of sparse tensors only "
            "the sum of sparse_coo is supported; use .to_sparse_coo(), or .to_dense()"
        )
    coalesced = tensor.detach().coalesce()
    wide = Reduction.of(op, coalesced.values()).accumulate_dtype
    with torch.no_grad(), comm.collective("sparse_all_reduce", None, f"{list(tensor.shape)}"):
        own_count = torch.tensor(coalesced._nnz(), device=comm.device)
        counts = [int(count) for count in all_gather(comm, own_count)]
        indices = _gather_entries(comm, coalesced.indices().t(), counts)
        values = _gather_entries(comm, coalesced.values(), counts)
        total = torch.sparse_coo_tensor(
            indices.t(), values.to(wide), tensor.shape, check_invariants=False
        )
        # Copying into tensor.detach() would replace the entries of that detached tensor only.
        return tensor.copy_(total.coalesce().to(tensor.dtype))


def _gather_entries(comm: Comm, entries: Tensor, counts: list[int]) -> Tensor:
    """Gather ``counts[r]`` entries [n, ...] of each rank r, one rank after the other."""
    # All ranks send as many entries: the largest count, padded with zeros.
    padded = entries.new_zeros(max(counts), *entries.shape[1:])
    padded[: len(entries)] = entries
    gathered = all_gather(comm, padded)
    return torch.cat([tensor[:count] for tensor, count in zip(gathered, counts)])
