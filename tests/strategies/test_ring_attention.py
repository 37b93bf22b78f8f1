"""Attention over a cut sequence equals that over the whole; what a rank holds falls as 1 / P."""

import itertools

import pytest
import torch
from ranks import travel_by_value
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit import WorkerError, run
from labkit.comm.comm import SubComm
from labkit.schedules.ring import chunk_bounds
from labkit.strategies.ring_attention import ring_attention
from labkit.workload.layers import HeldBytes

travel_by_value(__name__)

SAMPLES, HEADS, SIZE = 2, 3, 4


def whole(length):
    """q, k, v and the gradient of the result [n, h, T, d]; some scores are in the hundreds."""
    generator = torch.Generator().manual_seed(length)
    # Not contiguous, as heads are cut from one product.
    shape = 4, SAMPLES, length, HEADS, SIZE
    drawn = torch.randn(shape, generator=generator, dtype=torch.float64).transpose(2, 3)
    return drawn * torch.tensor([9.0, 9.0, 1.0, 1.0])[:, None, None, None, None]


def in_full(length, causal):
    q, k, v, gradient = whole(length)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v)]
    output = scaled_dot_product_attention(*inputs, is_causal=causal)
    return [output.detach(), *torch.autograd.grad(output, inputs, gradient)]


def on_a_part(comm, length, causal):
    """This rank's output and gradients, and the bytes that it has sent forward and backward."""
    part = slice(*chunk_bounds(length, comm.world_size)[comm.rank])
    q, k, v, gradient = (tensor[..., part, :] for tensor in whole(length))
    inputs, before = [tensor.requires_grad_() for tensor in (q, k, v)], comm.bytes_sent
    output = ring_attention(comm, *inputs, length=length, causal=causal)
    forward = comm.bytes_sent
    gradients = torch.autograd.grad(output, inputs, gradient)
    return [output.detach(), *gradients], (forward - before, comm.bytes_sent - forward)


def all_parts(comm):
    cases = itertools.product((8, 7, 2, 1), (False, True))
    found = {case: on_a_part(comm, *case) for case in cases}
    if comm.world_size == 4:
        # Two rings at the same time.
        pair = SubComm(comm, [comm.rank % 2, comm.rank % 2 + 2])
        found["pair"] = on_a_part(pair, 7, True)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_it_equals_full_attention_forward_and_backward(world_size):
    ranks = run(all_parts, world_size=world_size).values
    for case in ranks[0]:
        among, (length, causal) = (ranks, case) if case != "pair" else (ranks[::2], (7, True))
        parts = [rank[case][0] for rank in among]
        for together, due in zip(zip(*parts), in_full(length, causal)):
            found = torch.cat(together, dim=2)
            torch.testing.assert_close(found, due, rtol=0, atol=1e-10)
        if length % len(among) == 0:
            block = 8 * SAMPLES * HEADS * SIZE * length // len(among)
            passed = len(among) - 1
            due = 2 * passed * block, (4 * passed + 2 * (passed > 0)) * block
            assert all(rank[case][1] == due for rank in among)


class Live(TorchDispatchMode):
    """Counts the bytes of the storages that operations have made and that are alive."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = func(*args, **(kwargs or {}))
        given, made = (
            {t.untyped_storage() for t in tree_leaves(values) if isinstance(t, torch.Tensor)}
            for values in (args, outputs)
        )
        for storage in made - given:
            self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: one for key, one in self.alive.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return outputs


def memory(comm, length):
    """Bytes kept for backward, and the peak of both passes."""
    shape = SAMPLES, HEADS, length // comm.world_size, SIZE
    with HeldBytes(torch.nn.Identity()) as held, Live() as live:
        inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
        ring_attention(comm, *inputs, length=length).sum().backward()
    return held.num_bytes, live.peak


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


def test_a_part_of_another_length_is_refused():
    with pytest.raises(WorkerError, match="rank 0 of 2 has 3 of 5"):
        run(lambda comm: ring_attention(comm, *torch.ones(3, 1, 1, 2, 4), length=5), world_size=2)
