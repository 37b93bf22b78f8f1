"""SyncBatchNorm: a layer on shares equals BatchNorm on the batch, and a run equals one device."""

import copy
from functools import partial

import pytest
import torch
from odd_models import some_batches
from one_device import train_each
from torch import nn

from labkit import run
from labkit.collectives import ring_all_reduce
from labkit.costs.traffic import Cost, ring_all_reduce_cost, share_only_cost
from labkit.strategies.on_shares import Single
from labkit.strategies.sync_batch_norm import convert
from labkit.training.resolve import find_technique
from labkit.training.result import checksum, largest_difference


def frozen_weight():
    layer = nn.BatchNorm2d(4)
    layer.weight.requires_grad_(False)
    return layer


def channels_last(inputs):
    return inputs.contiguous(memory_format=torch.channels_last)


# name -> (makes a layer, the shape of a sample, what is done to the inputs)
LAYERS = {
    "3d": (partial(nn.BatchNorm3d, 2), (2, 2, 3, 2), None),
    "not affine": (partial(nn.BatchNorm2d, 4, affine=False), (4, 3, 2), None),
    "cumulative": (partial(nn.BatchNorm2d, 4, momentum=None, eps=0.1), (4, 3, 2), None),
    "frozen weight": (frozen_weight, (4, 3, 2), None),
    "channels last": (partial(nn.BatchNorm2d, 4), (4, 3, 2), channels_last),
}


def compared(comm, make_layer, shape, change=None, sizes=(3, 0, 4, 1)):
    """The furthest difference from BatchNorm on the whole batch after two passes."""
    generator = torch.Generator().manual_seed(3)
    plain = nn.Sequential(make_layer()).double().train()
    for parameter in plain.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
    synced = copy.deepcopy(plain)
    convert(synced, comm, range(comm.world_size))
    sizes = sizes[: comm.world_size]
    mine = slice(sum(sizes[: comm.rank]), sum(sizes[: comm.rank + 1]))
    pairs = []
    for _ in range(2):
        drawn = torch.randn(2, sum(sizes), *shape, generator=generator, dtype=torch.float64)
        whole, gradient = 3 * drawn[0] + 2, drawn[1]
        whole = change(whole) if change else whole
        whole, part = whole.requires_grad_(), whole.detach()[mine].requires_grad_()
        there, here = plain(whole), synced(part)
        there.backward(gradient)
        here.backward(gradient[mine])
        pairs += [(here, there[mine]), (part.grad, whole.grad[mine])]
    for here, there in zip(synced.parameters(), plain.parameters()):
        if here.requires_grad:
            pairs.append((ring_all_reduce(comm, here.grad), there.grad))
    pairs += list(zip(synced.buffers(), plain.buffers(), strict=True))
    return max((h - t).abs().max().item() for h, t in pairs if h.numel())


def all_compared(comm):
    return {name: compared(comm, *case) for name, case in LAYERS.items()}


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_layer_on_shares_equals_batch_norm_on_the_batch(world_size):
    for found in run(all_compared, world_size=world_size).values:
        assert max(found.values()) < 1e-12, found


def far_from_zero(comm):
    """The variance of values near a million, by a layer whose inputs need no gradient."""
    generator = torch.Generator().manual_seed(comm.rank)
    far = 1e6 + 1e-3 * torch.randn(50 + comm.rank, 3, generator=generator, dtype=torch.float64)
    synced = nn.Sequential(nn.BatchNorm1d(3, momentum=1.0).double())
    convert(synced, comm, range(2))
    before = comm.messages
    synced(far).sum().backward()
    return synced[0].running_var / 1e-6, comm.messages - before


def test_far_means_do_not_cancel():
    for variance, messages in run(far_from_zero, world_size=2).values:
        assert (variance > 0.5).all()
        assert (variance < 2).all()
        assert messages == 1  # inputs without a gradient need no message backward


def normed():
    """It takes [n, 6] as images of 2 x 3 pixels."""
    layers = [nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)]
    layers += [nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(24, 6))


def made(name, builtin=False, **options):
    return partial(find_technique(name, builtin=builtin), sync_batch_norm=True, **options)


# With several servers or micro-batches: tests/training has the rest.
JOBS = [made("ring_all_reduce"), made("parameter_server", servers=2)]
IN_THREE = [
    made("ring_all_reduce", accumulate=3),
    made("ddp", True, bucket_mb=0.0001, accumulate=3),
    made("parameter_server", True, accumulate=3),
]


def test_techniques_equal_one_device_at_the_cost_of_the_formula():
    batches = some_batches((7, 5, 2))
    run_of = partial(run, train_each, batches, batches[0][0])
    singles = [(Single, normed), (partial(Single, accumulate=3, sync_batch_norm=True), normed)]
    ((alone, alone_in_three),) = run_of(singles, world_size=1).values
    jobs = [(job, normed) for job in [*JOBS, *IN_THREE]]
    ranks = run_of(jobs, world_size=3).values
    for number, by_rank in enumerate(zip(*ranks, strict=True)):
        state = (alone if number < len(JOBS) else alone_in_three).state
        assert largest_difference(by_rank[0].state, state) < 1e-10, jobs[number]
        assert len({checksum(rank.state) for rank in by_rank}) == 1, jobs[number]
    elements = sum(p.numel() for p in normed().parameters())
    # Of C channels: means, sums of squared deviations and the count forward, two sums backward.
    rows = [row for channels in (3, 4) for row in (2 * channels + 1, 2 * channels)]
    # Of batches of 7, 5 and 2 samples: the last has two micro-batches.
    for number, micro_batches in ((0, 3), (len(JOBS), 8)):
        for rank, found in enumerate(ranks):
            norms = [share_only_cost(3 * row, 8, 3, rank) for row in rows]
            steps = [ring_all_reduce_cost(elements, 8, 3, rank)] * 3
            cost = sum([*steps, *norms * micro_batches], Cost(0, 0, 0))
            messages, num_bytes = map(sum, zip(*found[number].sent))
            assert (messages, num_bytes) == (cost.messages, cost.num_bytes)
