"""Attention over a cut sequence equals that over the whole; what a rank holds falls as 1 / P."""

import itertools
from functools import partial

import pytest
import torch
from ranks import travel_by_value
from torch.nn.functional import scaled_dot_product_attention

from labkit import WorkerError, run
from labkit.costs.traffic import Cost
from labkit.engine.comm.comm import SubComm
from labkit.schedules.ring import attention_chunks
from labkit.strategies.ring_attention import ring_attention
from labkit.workload.layers import HeldBytes
from workbook.exercises.grader.held_memory import PeakBytes

travel_by_value(__name__)

SAMPLES, HEADS, SIZE = 2, 4, 4
# Heads of keys and values: with 2 of them, two heads of queries share each.
KV_HEADS = 4, 2


def ring_attention_cost(shape, element_bytes, world_size, rank=0, zigzag=False):
    """Ring attention forward and backward; ``shape`` is (n, k, T, d), of all keys.

    With n k (T / P) d elements in a block 2 (P - 1) blocks forward. Backward as many again, and
    2 P blocks of gradients, whose elements have at least 4 bytes.
    """
    samples, heads, length, size = shape
    steps = world_size - 1
    pair = 2 * samples * heads * size
    # The right neighbor's own block is the one that this rank does not pass on.
    chunks = attention_chunks((rank + 1) % world_size, world_size, length, zigzag)
    passed_on = length - sum(len(chunk) for chunk in chunks)
    blocks = Cost(steps, steps, passed_on * pair * element_bytes)
    if world_size == 1:
        return blocks, blocks
    gradients = Cost(world_size, world_size, length * pair * max(4, element_bytes))
    return blocks, blocks + gradients


def whole(length, kv_heads):
    """q, k, v and the gradient of the result [n, h, T, d]; some scores are in the hundreds."""
    generator = torch.Generator().manual_seed(length)
    # Not contiguous, as heads are cut from one product.
    shape = 4, SAMPLES, length, HEADS, SIZE
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64).transpose(2, 3)
    q, k, v, gradient = drawn * torch.tensor([9.0, 9.0, 1.0, 1.0])[:, None, None, None, None]
    return q, k[:, :kv_heads], v[:, :kv_heads], gradient


def full_attention(tensors, causal):
    """The output of PyTorch's attention of the whole sequence, and the gradients of q, k, v."""
    *inputs, gradient = tensors
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    output = scaled_dot_product_attention(*inputs, is_causal=causal, enable_gqa=True)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def positions_of(rank, world_size, length, zigzag):
    return [*itertools.chain(*attention_chunks(rank, world_size, length, zigzag))]


def in_order_of_ranks(world_size, length, zigzag):
    ranks = range(world_size)
    return [*itertools.chain(*(positions_of(rank, world_size, length, zigzag) for rank in ranks))]


def on_a_part(comm, tensors, causal, zigzag):
    """This rank's output and gradients, and the messages and bytes sent forward and backward."""
    length = tensors[0].shape[2]
    part = positions_of(comm.rank, comm.world_size, length, zigzag)
    *inputs, gradient = (tensor[..., part, :] for tensor in tensors)
    inputs = [tensor.requires_grad_() for tensor in inputs]
    start = comm.messages, comm.bytes_sent
    output = ring_attention(comm, *inputs, length=length, causal=causal, zigzag=zigzag)
    forward = comm.messages - start[0], comm.bytes_sent - start[1]
    gradients = torch.autograd.grad(output, inputs, gradient)
    backward = comm.messages - start[0] - forward[0], comm.bytes_sent - start[1] - forward[1]
    return [output.detach(), *gradients], (forward, backward)


def all_parts(comm):
    cases = itertools.product((8, 7, 2, 1), KV_HEADS, (False, True), (False, True))
    found = {case: on_a_part(comm, whole(*case[:2]), *case[2:]) for case in cases}
    if comm.world_size == 4:
        # Two rings at the same time.
        pair = SubComm(comm, [comm.rank % 2, comm.rank % 2 + 2])
        found["pair"] = on_a_part(pair, whole(7, 4), True, False)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_it_equals_full_attention_forward_and_backward(world_size):
    """With a causal mask or none, shared keys, one chunk per rank or two, also empty ones."""
    ranks = run(all_parts, world_size=world_size).values
    for case in ranks[0]:
        among, (length, kv_heads, causal, zigzag) = ranks, (7, 4, True, False)
        if case == "pair":
            among = ranks[::2]
        else:
            length, kv_heads, causal, zigzag = case
        order = in_order_of_ranks(len(among), length, zigzag)
        parts = [rank[case][0] for rank in among]
        full = full_attention(whole(length, kv_heads), causal)
        for together, due in zip(zip(*parts), full):
            found = torch.cat(together, dim=2)
            torch.testing.assert_close(found, due[:, :, order], rtol=0, atol=1e-10)
        for place, rank in enumerate(among):
            shape = SAMPLES, kv_heads, length, SIZE
            cost = ring_attention_cost(shape, 8, len(among), place, zigzag=zigzag)
            for used, due in zip(rank[case][1], cost):
                assert used == (due.messages, due.num_bytes)


def in_16_bits(comm, dtype, causal, autocast):
    generator = torch.Generator().manual_seed(0)
    tensors = torch.randn(4, 1, 2, 512, 32, generator=generator).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return tensors, *on_a_part(comm, tensors, causal, True)


def relative_errors(found, exact):
    return [((one - due).norm() / due.norm()).item() for one, due in zip(found, exact)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_16_bits_are_as_exact_as_pytorchs_attention_on_any_number_of_ranks(dtype, causal):
    """Forward and backward, although the sums of all blocks are added up on the way."""
    for world_size in (1, 4):
        ranks = run(in_16_bits, dtype, causal, world_size == 1, world_size=world_size).values
        tensors = ranks[0][0]
        order = in_order_of_ranks(world_size, 512, True)
        ours = [torch.cat(parts, dim=2) for parts in zip(*(parts for _, parts, _ in ranks))]
        exact, theirs = (
            [tensor[:, :, order] for tensor in full_attention(given, causal)]
            for given in (tensors.double(), tensors)
        )
        assert all(one.dtype == dtype for one in ours)
        for mine, pytorchs in zip(relative_errors(ours, exact), relative_errors(theirs, exact)):
            assert mine < 1.5 * pytorchs
        for rank, (_, _, sent) in enumerate(ranks):
            cost = ring_attention_cost((1, 2, 512, 32), 2, world_size, rank, zigzag=True)
            assert sent[1][1] == cost[1].num_bytes


def test_zigzag_gives_each_rank_as_many_scores_of_a_causal_mask():
    scores = [sum(p + 1 for p in positions_of(rank, 4, 64, True)) for rank in range(4)]
    assert len(set(scores)) == 1


def memory(comm, length):
    """Bytes kept for backward, and the peak of both passes."""
    shape = SAMPLES, HEADS, length // comm.world_size, SIZE
    with HeldBytes(torch.nn.Identity()) as held, PeakBytes() as peak:
        inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        ring_attention(comm, *inputs, length=length).sum().backward()
    return held.num_bytes, peak.num_bytes


def test_the_memory_of_a_rank_falls_as_the_number_of_ranks_rises():
    length, peaks = 240, {}
    for world_size in (1, 2, 4):
        queries = SAMPLES * HEADS * length // world_size
        for kept, peak in run(memory, length, world_size=world_size).values:
            # q, k, v, the result, and a number for each query.
            assert kept == 4 * queries * (4 * SIZE + 1)
            peaks[world_size] = peak
    # Even faster than 1 / P: the scores of a block fall as 1 / P^2.
    assert peaks[2] < peaks[1] / 2
    assert peaks[4] < peaks[2] / 2


def test_parts_that_do_not_fit_are_refused():
    fits, three_heads = torch.ones(1, 2, 3, 4), torch.ones(1, 3, 3, 4)
    for k, length in ((fits, 4), (three_heads, 3), (fits.bfloat16(), 3)):
        with pytest.raises(WorkerError, match=r"q is float32 .* positions of rank 0"):
            run(partial(ring_attention, length=length), fits, k, k, world_size=1)
