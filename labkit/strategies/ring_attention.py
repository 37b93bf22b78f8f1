"""Ring attention: a sequence is cut over the ranks; blocks of keys and values travel the ring.

Rank r keeps the queries of its block of the sequence, and in P steps all keys and values come by:

1. **Attend** to the block that is here, at first the rank's own. 2. **Pass it on** to rank r + 1,
and receive that of rank r - 1.

The softmax is computed as the keys come. Of those so far a query has the highest score m, the sum
l of exp(score - m), and o, the sum of exp(score - m) value. If a block raises m, what was summed
shrinks by exp(old m - new m). The result is o / l. Backward computes the weights again, from
m + log l; the blocks travel with the gradients of their keys and values, to which every rank adds
its part, and one more step takes these home. In all a rank sends 2 (P - 1) blocks forward and
4 (P - 1) + 2 backward, and what it holds falls as 1 / P. With a causal mask later blocks are not
computed: the last rank has the most to do.

Symbols: P ranks, T positions in all, t of this rank; n samples, h heads, d numbers per head.
Sources: Liu, Zaharia and Abbeel, "Ring attention with blockwise transformers for near-infinite
context" (2023), section 3; Milakov and Gimelshein, "Online normalizer calculation for softmax"
(2018), algorithm 3; Rabe and Staats, "Self-attention does not need O(n^2) memory" (2021).
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from labkit.comm.comm import Comm
from labkit.schedules.ring import chunk_bounds


class Running(NamedTuple):
    """The softmax over the keys so far: m and l [n, h, t, 1], o [n, h, t, d]."""

    highest: Tensor
    total: Tensor
    output: Tensor


def ring_attention(
    comm: Comm, q: Tensor, k: Tensor, v: Tensor, length: int, causal: bool = True
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks, [n, h, t, d]; differentiable.

    ``q``, ``k`` and ``v`` [n, h, t, d] are the positions ``chunk_bounds(length, P)[rank]`` of
    ``length`` = T, else ValueError; t may be 0. ``causal``: none sees a later position.
    """
    sizes = [end - start for start, end in chunk_bounds(length, comm.world_size)]
    if not q.shape == k.shape == v.shape or q.shape[2] != sizes[comm.rank]:
        raise ValueError(
            f"q, k, v have {q.shape[2]}, {k.shape[2]}, {v.shape[2]} positions: rank {comm.rank} "
            f"of {comm.world_size} has {sizes[comm.rank]} of {length}"
        )
    return _RingAttention.apply(q, k, v, comm, sizes, causal)


def attend_block(running: Running, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Running:
    """The running softmax of queries [n, h, t, d] after one more block of keys [n, h, u, d].

    ``causal`` is for a rank's own block, which comes first, so that every query has seen a key.
    """
    scores = scores_of(q, k, causal)
    highest = torch.maximum(running.highest, scores.amax(dim=-1, keepdim=True))
    weights, shrunk = (scores - highest).exp(), (running.highest - highest).exp()
    total = running.total * shrunk + weights.sum(dim=-1, keepdim=True)
    return Running(highest, total, running.output * shrunk + weights @ v)


def scores_of(q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """q k / sqrt(d), [n, h, t, u]; with ``causal`` minus infinity for a later key."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores += torch.full_like(scores[0, 0], -math.inf).triu(1)
    return scores


def travelling(comm: Comm, held: Tensor, sizes: list[int]) -> Iterator[tuple[int, Tensor]]:
    """Each block [x, n, h, t, d] with its number, this rank's own, ``held``, first."""
    for step in range(comm.world_size):
        block = (comm.rank - step) % comm.world_size
        held = pass_on(comm, held, sizes[block]) if step else held
        yield block, held


def pass_on(comm: Comm, held: Tensor, positions: int) -> Tensor:
    """Send a block to the right; returns the one from the left, which has ``positions``."""
    if comm.world_size == 1:
        return held
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    incoming = held.new_empty((*held.shape[:3], positions, held.shape[-1]))
    return comm.exchange(held, right, incoming, left)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, comm: Comm, sizes: list[int], causal: bool
    ) -> Tensor:
        ctx.comm, ctx.sizes, ctx.causal = comm, sizes, causal
        nothing = q.new_zeros((*q.shape[:3], 1))
        running = Running(nothing - math.inf, nothing, torch.zeros_like(q))
        with comm.collective("ring_attention"):
            for block, (keys, values) in travelling(comm, torch.stack([k, v]), sizes):
                if _is_seen(ctx, block):
                    with comm.span("compute"):
                        is_own = causal and block == comm.rank
                        running = attend_block(running, q, keys, values, is_own)
        output = running.output / running.total
        ctx.save_for_backward(q, k, v, output, running.highest + running.total.log())
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        q, k, v, output, log_sum = ctx.saved_tensors
        comm, scale = ctx.comm, 1 / math.sqrt(q.shape[-1])
        of_q, mean = torch.zeros_like(q), (gradient * output).sum(dim=-1, keepdim=True)
        mine = torch.stack([k, v, torch.zeros_like(k), torch.zeros_like(v)])
        with comm.collective("ring_attention backward"):
            for block, held in travelling(comm, mine, ctx.sizes):
                keys, values, of_keys, of_values = held
                if _is_seen(ctx, block):
                    with comm.span("compute"):
                        scores = scores_of(q, keys, ctx.causal and block == comm.rank)
                        weights = (scores - log_sum).exp()
                        of_scores = weights * (gradient @ values.mT - mean) * scale
                        of_q += of_scores @ keys
                        of_keys += of_scores.mT @ q
                        of_values += weights.mT @ gradient
            of_k, of_v = pass_on(comm, held[2:], ctx.sizes[comm.rank])
        return of_q, of_k, of_v, None, None, None


def _is_seen(ctx: Any, block: int) -> bool:
    return ctx.sizes[block] > 0 and not (ctx.causal and block > ctx.comm.rank)
