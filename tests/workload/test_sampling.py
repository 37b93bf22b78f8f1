"""The sampler: every sample once over all ranks, in shares that differ by one at most."""

import pytest
import torch

from labkit.workload.sampling import batch_slices, epoch_order, share


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("num_samples", "batch_size"), [(12, 4), (13, 5), (7, 3), (3, 8), (1, 1)])
def test_over_an_epoch_every_sample_is_used_exactly_once(world_size, num_samples, batch_size):
    used = []
    for rank in range(world_size):
        order = epoch_order(num_samples, epoch=2, seed=9)  # each rank computes it for itself
        for batch in batch_slices(order, batch_size):
            used += share(batch, rank, world_size).tolist()
    assert sorted(used) == list(range(num_samples))


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 8, 13])
def test_shares_are_contiguous_and_differ_by_one_at_most(size, count):
    batch = torch.randperm(size)
    shares = [share(batch, index, count) for index in range(count)]
    sizes = [len(part) for part in shares]
    assert torch.equal(torch.cat(shares), batch)
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


def test_the_order_depends_on_epoch_and_seed_alone():
    state = torch.get_rng_state()
    first = epoch_order(100, epoch=1, seed=0)
    torch.manual_seed(77)
    assert torch.equal(first, epoch_order(100, epoch=1, seed=0))
    assert not torch.equal(first, epoch_order(100, epoch=0, seed=0))
    assert not torch.equal(first, epoch_order(100, epoch=0, seed=1))
    torch.set_rng_state(state)
    epoch_order(100, epoch=1, seed=0)
    assert torch.equal(torch.get_rng_state(), state)
