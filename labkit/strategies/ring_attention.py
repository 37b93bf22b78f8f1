"""Ring attention: a sequence is cut over the ranks; blocks of keys and values travel the ring.

Rank r keeps the queries of its block of the sequence, and in P steps all keys and values come by:

1. **Attend** to the block that is here, at first the rank's own. 2. **Pass it on** to rank r + 1,
and receive that of rank r - 1, while step 1 goes on.

The softmax is computed as the keys come. Of those so far a query has the highest score m, the sum
l of exp(score - m), and o, the sum of exp(score - m) value. If a block raises m, what was summed
shrinks by exp(old m - new m). The result is o / l. Backward computes the weights again, from
m + log l; beside the blocks travel the gradients of their keys and values, to which every rank
adds its part, and one more step takes these home. In all a rank sends 2 (P - 1) blocks forward and
4 (P - 1) + 2 backward, and what it holds falls as 1 / P. 16-bit blocks travel as they are; sums,
and the gradients that travel, are float32, or each block would add a rounding.

With a causal mask later blocks are not computed: the last rank has the most to do. With **zigzag**
each rank has an early and a late chunk, and all have as much: ``schedules.ring.attention_chunks``.

Symbols: P ranks, T positions in all, t of this rank; n samples, h heads of queries, k of keys and
values, each for h / k of queries (grouped queries), d numbers per head.
Sources: Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite
context" (2023), section 3; Milakov and Gimelshein, "Online normalizer calculation for softmax"
(2018), algorithm 3; Rabe and Staats, "Self-attention does not need O(n^2) memory" (2021); Ainslie
et al., "GQA" (2023), section 2.2.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.engine.comm.comm import Comm
from labkit.engine.comm.transport import describe
from labkit.engine.comm.work import work_queue_of
from labkit.schedules.ring import attention_chunks

# By rank: one or two chunks of the sequence.
Chunks = list[list[range]]


class Running(NamedTuple):
    """The softmax over the keys so far: m and l [..., t, 1], o [..., t, d]."""

    highest: Tensor
    total: Tensor
    output: Tensor


def ring_attention(
    comm: Comm,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    length: int,
    causal: bool = True,
    zigzag: bool = False,
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks, [n, h, t, d]; differentiable.

    ``q`` [n, h, t, d], ``k`` and ``v`` [n, k, t, d] are the positions ``attention_chunks(rank, P,
    length, zigzag)`` of ``length`` = T, else ValueError; t may be 0. ``causal``: none sees a later
    position.
    """
    ranks = range(comm.world_size)
    chunks = [attention_chunks(rank, comm.world_size, length, zigzag) for rank in ranks]
    positions = sum(map(len, chunks[comm.rank]))
    groups = q.shape[1] // k.shape[1]
    q_shape = len(k), groups * k.shape[1], positions, k.shape[3]
    if q.shape != q_shape or k.shape != v.shape or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            f"q is {describe(q)}, k {describe(k)}, v {describe(v)}: all three need one dtype, "
            f"n, d and the {positions} of {length} positions of rank {comm.rank} of "
            f"{comm.world_size}; k and v may have fewer heads, a number that divides that of q"
        )
    by_group = q.unflatten(1, (k.shape[1], groups))
    return _RingAttention.apply(by_group, k, v, comm, chunks, causal).flatten(1, 2)


def attend_block(running: Running, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Running:
    """The running softmax of queries [..., t, d] after one more block of keys [..., u, d].

    ``causal`` is for a rank's own block, which comes first, so that every query has seen a key.
    """
    scores = scores_of(q, k, causal)
    highest = torch.maximum(running.highest, scores.amax(dim=-1, keepdim=True))
    weights = (scores - highest).exp()
    shrink = (running.highest - highest).exp()
    total = running.total * shrink + weights.sum(dim=-1, keepdim=True)
    output = running.output * shrink + weights @ wide(v)
    return Running(highest, total, output)


def scores_of(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """q k / sqrt(d), [..., t, u]; with ``causal`` minus infinity for a later key."""
    scores = wide(q) @ wide(k).mT / math.sqrt(q.shape[-1])
    if causal:
        scores += scores.new_full(scores.shape[-2:], -math.inf).triu(1)
    return scores


def wide(tensor: Tensor) -> Tensor:
    """The tensor in the dtype of sums: float32 instead of 16 bits."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def traveling(comm: Comm, block: Tensor, sizes: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's block [x, n, k, u, d], this rank's own first; the next is under way."""
    for step in range(comm.world_size - 1):
        owner = (comm.rank - step) % comm.world_size
        receive = pass_on(comm, block, sizes[owner - 1])
        yield owner, block
        block = receive()
    yield (comm.rank + 1) % comm.world_size, block


def pass_on(comm: Comm, block: Tensor, positions: int) -> Callable[[], Tensor]:
    """Begin to send a block to the right; returns a function that waits for the left one's."""
    right = (comm.rank + 1) % comm.world_size
    left = (comm.rank - 1) % comm.world_size
    if right == comm.rank:
        return lambda: block
    incoming = block.new_empty((*block.shape[:3], positions, block.shape[-1]))
    work = work_queue_of(comm).add(
        "ring_attention",
        lambda comm: comm.exchange(block, right, incoming, left),
        [block],
        [incoming],
    )

    def receive() -> Tensor:
        with comm.span("wait"):
            work.wait()
        return incoming

    return receive


class _RingAttention(torch.autograd.Function):
    """Queries are [n, k, h / k, t, d] here: by the head of the keys that they meet."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, comm: Comm, chunks: Chunks, causal: bool
    ) -> Tensor:
        ctx.comm = comm
        ctx.chunks = chunks
        ctx.causal = causal
        ctx.sizes = [sum(map(len, rank_chunks)) for rank_chunks in chunks]
        zeros = torch.zeros_like(wide(q[..., :1]))
        running = Running(zeros - math.inf, zeros, torch.zeros_like(wide(q)))
        # (Autocast would round the products to 16 bits.)
        with comm.collective("ring_attention"), torch.autocast(q.device.type, enabled=False):
            for owner, block in traveling(comm, torch.stack([k, v]), ctx.sizes):
                rows, columns = _visible(ctx, owner)
                if _is_empty(rows) or _is_empty(columns):
                    continue
                with comm.span("compute"):
                    keys, values = block[..., columns, :].unsqueeze(3)
                    before = Running(*(tensor[..., rows, :] for tensor in running))
                    is_masked = causal and owner == comm.rank
                    after = attend_block(before, q[..., rows, :], keys, values, is_masked)
                    for tensor, new_rows in zip(running, after):
                        tensor[..., rows, :] = new_rows
        output = (running.output / running.total).to(q.dtype)
        ctx.save_for_backward(q, k, v, output, running.highest + running.total.log())
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        comm = ctx.comm
        q, k, v, output, log_sum = (tensor.to(comm.device) for tensor in ctx.saved_tensors)
        scale = 1 / math.sqrt(q.shape[-1])
        gradient = wide(gradients[0]).to(comm.device)
        mean = (gradient * output).sum(dim=-1, keepdim=True)
        q_gradient = torch.zeros_like(wide(q))
        receive: Callable[[], Tensor] | None = None
        title = "ring_attention backward"
        with comm.collective(title), torch.autocast(q.device.type, enabled=False):
            for owner, block in traveling(comm, torch.stack([k, v]), ctx.sizes):
                block_gradient = torch.zeros_like(wide(block))
                rows, columns = _visible(ctx, owner)
                if not (_is_empty(rows) or _is_empty(columns)):
                    with comm.span("compute"):
                        keys, values = wide(block[..., columns, :]).unsqueeze(3)
                        queries = wide(q[..., rows, :])
                        output_gradient = gradient[..., rows, :]
                        scores = scores_of(queries, keys, ctx.causal and owner == comm.rank)
                        weights = (scores - log_sum[..., rows, :]).exp()
                        weight_gradient = output_gradient @ values.mT - mean[..., rows, :]
                        score_gradient = weights * weight_gradient * scale
                        q_gradient[..., rows, :] += score_gradient @ keys
                        # A group's queries have met the same keys and values.
                        block_gradient[0][..., columns, :] += (score_gradient.mT @ queries).sum(2)
                        block_gradient[1][..., columns, :] += (weights.mT @ output_gradient).sum(2)
                if receive:
                    block_gradient += receive()
                receive = pass_on(comm, block_gradient, ctx.sizes[owner - 1])
            assert receive
            k_gradient, v_gradient = receive().to(k.dtype)
        return q_gradient.to(q.dtype), k_gradient, v_gradient, None, None, None


def _visible(ctx: Any, owner: int) -> tuple[slice, slice]:
    """The queries of this rank and the keys of ``owner`` that meet."""
    rank = ctx.comm.rank
    rows = slice(0, ctx.sizes[rank])
    columns = slice(0, ctx.sizes[owner])
    if ctx.causal and owner < rank:
        # All queries are later than its early keys, and earlier than its late ones.
        columns = slice(0, len(ctx.chunks[owner][0]))
    elif ctx.causal and owner > rank:
        # Its keys are earlier than the late queries alone.
        rows = slice(len(ctx.chunks[rank][0]), ctx.sizes[rank])
    return rows, columns


def _is_empty(positions: slice) -> bool:
    return positions.start == positions.stop
