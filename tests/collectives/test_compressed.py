"""Compressed all-reduce: the error is bounded, the messages are counted, the replicas agree."""

import pytest
import torch

from labkit import run
from labkit.collectives.compressed import TopK, all_reduce_of, sparse_all_reduce
from labkit.costs.traffic import ring_all_reduce_cost, share_only_cost

SIZES = (1000, 7, 2, 1, 0)
DTYPES = (torch.float32, torch.float64)
EXACT_BITS = {"fp16": 11, "bf16": 8}


def numbers(rank, size, dtype=torch.float32):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(size, generator=generator).to(dtype)


def cost_of(compress, size, element_bytes, world_size, rank):
    """2 bytes an element around the ring; of the largest 1 %, values and indices to everyone."""
    if compress == "topk":
        kept = min(size, max(1, size // 100))
        return share_only_cost(world_size * 2 * kept, element_bytes, world_size, rank)
    return ring_all_reduce_cost(size, 2, world_size, rank)


def every_sum(comm):
    """By compression, dtype and size: the sum and its cost."""
    found = {}
    for compress in ("fp16", "bf16", "topk"):
        for dtype in DTYPES:
            for size in SIZES:
                before = comm.messages, comm.bytes_sent
                total = all_reduce_of(compress)(comm, numbers(comm.rank, size, dtype))
                spent = comm.messages - before[0], comm.bytes_sent - before[1]
                found[compress, dtype, size] = total, spent
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_end_with_the_same_bits_at_the_cost_of_the_formula(world_size):
    ranks = run(every_sum, world_size=world_size, device="cpu").values
    for case, (first, _) in ranks[0].items():
        compress, dtype, size = case
        for rank, found in enumerate(ranks):
            total, spent = found[case]
            assert total.dtype == dtype
            assert torch.equal(total, first)
            cost = cost_of(compress, size, dtype.itemsize, world_size, rank)
            assert spent == (cost.messages, cost.num_bytes), case
        if compress != "topk":
            inputs = torch.stack([numbers(rank, size, dtype) for rank in range(world_size)])
            bound = world_size * 2.0 ** -EXACT_BITS[compress] * inputs.abs().sum(dim=0)
            assert bool(((first - inputs.sum(dim=0)).abs() <= bound).all())


def sums_of_bfloat16(comm):
    mine = torch.tensor([256.0 if comm.rank == 0 else 0.75]).bfloat16()
    return TopK()(comm, mine.clone()), sparse_all_reduce(comm, mine.to_sparse()).to_dense()


def test_16_bits_are_added_up_in_float32():
    """256 + 0.75 + 0.75: in bfloat16 each 0.75 would be lost."""
    for sums in run(sums_of_bfloat16, world_size=3, device="cpu").values:
        assert [total.item() for total in sums] == [258, 258]


def many_rounds(comm, rounds):
    """Returns the sum of the results, this rank's sum of inputs, its residual, cost by round."""
    top_k, got, given, touched = TopK(), torch.zeros(300), torch.zeros(300), []
    for number in range(rounds):
        gradient = numbers(10 * number + comm.rank, 300)
        given += gradient
        result = top_k(comm, gradient.clone())
        touched.append(int(result.count_nonzero()))
        got += result
    return got, given, top_k.residual, touched


def test_top_k_sends_late_what_it_does_not_send_at_once():
    ranks = run(many_rounds, 40, world_size=2, device="cpu").values
    got, _, _, touched = ranks[0]
    given = sum(given for _, given, _, _ in ranks)
    held_back = sum(residual for _, _, residual, _ in ranks)
    torch.testing.assert_close(got + held_back, given, rtol=1e-4, atol=1e-4)
    assert max(touched) <= 2 * 3
    assert min(touched) >= 3
    # Three elements per round: without the residual, the same few would be sent in every round.
    assert got.count_nonzero() > 100
