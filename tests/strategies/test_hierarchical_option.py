"""Techniques that sum inside hosts first: they follow one device, and replicas agree to the bit.

Further options with them: tests/training/test_option_matrix.py.
"""

import pytest
import torch
from ranks import travel_by_value
from torch import nn

import labkit
from labkit import EmulatedLink, RunConfig, run
from labkit.costs import hierarchical_all_reduce_cost
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
