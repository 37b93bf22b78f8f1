"""Techniques that sum inside hosts first: they follow one device, and replicas agree to the bit.

Further options with them: tests/training/test_option_matrix.py.
"""

import pytest
import torch
from ranks import travel_by_value
from torch import nn

import labkit
from labkit import EmulatedLink, RunConfig, collectives, run
from labkit.costs import hierarchical_all_reduce_cost
from labkit.strategies.ddp.bucketed import BucketedDDP
from labkit.strategies.ddp.naive import NaiveDDP
from labkit.training.loop import fit
from labkit.training.own import Own
from labkit.training.resolve import make_strategy
from labkit.training.state import largest_difference

travel_by_value(__name__)

BASE = {"batch_size": 9, "epochs": 2, "model": "own", "dataset": "own", "dtype": "float64"}
JOBS = {
    "ring": {"strategy": "ring_all_reduce"},
    "accumulate": {"strategy": "ring_all_reduce", "accumulate": 2},
    "buckets": {"strategy": "ddp", "bucket_mb": 0.0},
    "one bucket": {"strategy": "ddp", "accumulate": 2},
    "PyTorch's DDP": {"strategy": "ddp", "builtin": True, "backend": "labkit"},
    "its buckets": {"strategy": "ddp", "builtin": True, "backend": "labkit", "bucket_mb": 1e-4},
}


def net():
    torch.manual_seed(0)
    pool = nn.AdaptiveAvgPool2d(2)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), pool, nn.Flatten(), nn.Linear(12, 10))


def images():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(14, 1, 8, 8, generator=generator), torch.arange(14) % 10


OWN = Own(model=net, dataset=images)


def fit_all(comm, names):
    """By job: the state, a checksum, the bytes sent, and what is used below DDP afterwards."""
    found = {}
    for name in names:
        settings = JOBS.get(name, {"strategy": "single"}) | BASE
        config = RunConfig(**settings, world_size=comm.world_size, hierarchical=name in JOBS)
        report = fit(comm, config, make_strategy(config, own=OWN), False, OWN)
        found[name] = report.state, report.checksum, report.bytes_sent, labkit.backend.use(None)
    return found


@pytest.fixture(scope="module")
def single():
    return run(fit_all, ["single"], world_size=1).values[0]["single"][0]


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_each_technique_follows_one_device_over_emulated_hosts(single, world_size):
    """With 3 ranks hosts of two and one, with 4 two of two, with 1 no other host."""
    link = EmulatedLink(ranks_per_host=2)
    by_rank = run(fit_all, list(JOBS), world_size=world_size, link=link).values
    hosts = link.hosts(world_size)
    for name in JOBS:
        states, checksums, num_bytes, used = zip(*(found[name] for found in by_rank))
        assert largest_difference(states[0], single) < 1e-10, name
        assert len(set(checksums)) == 1, name
        assert set(used) == {None}, "a run leaves the backend as it was"
        if name == "ring":
            elements = sum(tensor.numel() for tensor in single.values())
            costs = [
                hierarchical_all_reduce_cost(elements, 8, hosts, r) for r in range(world_size)
            ]
            # 14 samples in batches of 9, twice: 4 updates.
            assert list(num_bytes) == [4 * cost.num_bytes for cost in costs]


def both_replicas(comm):
    """By kind of replica, the gradients."""
    found = {}
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(comm.rank)).double()
    for kind in (NaiveDDP, BucketedDDP):
        torch.manual_seed(0)
        replica = kind(comm, nn.Linear(6, 3).double(), hierarchical=True, find_unused=True)
        replica(x).square().mean().backward()
        found[kind.__name__] = [p.grad.clone() for p in replica.parameters()]
    return found


def test_the_naive_and_the_bucketed_replica_sum_the_same():
    everyone = run(both_replicas, world_size=3, link=EmulatedLink(ranks_per_host=2)).values
    torch.manual_seed(0)
    alone = nn.Linear(6, 3).double()
    for rank in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(rank)).double()
        (alone(x).square().mean() / 3).backward()
    for kind, of_rank_0 in everyone[0].items():
        for found in everyone:
            for mine, first, one in zip(found[kind], of_rank_0, alone.parameters(), strict=True):
                torch.testing.assert_close(mine, one.grad, rtol=0, atol=1e-12)
                assert torch.equal(mine, first)


def in_use(comm):
    """What ``use`` returns when functions take turns."""
    first = labkit.backend.use(collectives.fast_hierarchical_all_reduce)
    second = labkit.backend.use(None)
    return first, getattr(second, "__name__", None)


def test_use_returns_what_was_used_before():
    assert run(in_use, world_size=1).values == [(None, "fast_hierarchical_all_reduce")]
