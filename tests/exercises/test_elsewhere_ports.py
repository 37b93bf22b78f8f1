"""What the checks of page 18 compare with: real Horovod-like and DDP runs, and real BatchNorm."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit
import labkit.horovod as hvd
from workbook import check
from workbook.exercises.elsewhere import GRADIENTS, STATISTICS, step_of
from workbook.exercises.programs import with_horovod

SHARES = ([1.0, 2.0, 6.0], [5.0, 7.0], [0.5, 0.25, -8.0])
MOMENTUM = 0.3


class Both(nn.Module):
    """A weight, and BatchNorm beside it: what a black box of the exercise stands for."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.norm = nn.BatchNorm1d(1, momentum=MOMENTUM, affine=False).double()

    def forward(self, samples):
        self.norm(samples[:, None])
        return (self.weight * samples).mean()


def one_update(model, optimizer, samples):
    """How far the weight moves, and the running mean with which the next forward begins."""
    model(samples).backward()
    optimizer.step()
    seen = []
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    inner.norm.register_forward_pre_hook(lambda norm, _: seen.append(norm.running_mean.item()))
    model(samples)
    return -inner.weight.item(), seen[0]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


def real_steps(comm):
    samples = torch.tensor(SHARES[comm.rank], dtype=torch.float64)
    hvd.init(comm)
    found = {}
    for name, op in (("horovod", hvd.Average), ("horovod, sum", hvd.Sum)):
        model = Both()
        found[name] = one_update(model, hvd.DistributedOptimizer(sgd(model), op=op), samples)
    model = DistributedDataParallel(Both())
    found["ddp"] = one_update(model, sgd(model), samples)
    model = Both()
    model.norm = hvd.SyncBatchNorm(1, momentum=MOMENTUM, affine=False).double()
    found["sync"] = one_update(model, hvd.DistributedOptimizer(sgd(model)), samples)
    hvd.shutdown()
    return found


@pytest.fixture(scope="module")
def ran():
    return labkit.run(real_steps, world_size=3, device="cpu").values


def test_the_black_boxes_are_what_the_frameworks_do(ran):
    conventions = {
        "horovod": ("mean of means", "own"),
        "horovod, sum": ("sum of means", "own"),
        "ddp": ("mean of means", "rank 0"),
        "sync": ("mean of means", "whole batch"),
    }
    for name, convention in conventions.items():
        moved, means = zip(*(steps[name] for steps in ran))
        expected, kept = step_of(*convention, momentum=MOMENTUM)(SHARES)
        assert moved == pytest.approx([expected] * 3, rel=1e-12), name
        assert means == pytest.approx(kept, rel=1e-12), name


def test_the_page_s_script_is_what_ports_are_compared_with():
    assert check.elsewhere.to_ddp(with_horovod.train, world_sizes=(3,)).passed


def test_no_two_pairs_of_semantics_do_the_same():
    pairs = list(itertools.product(GRADIENTS, STATISTICS))
    found = [step_of(*pair)([[1.0, 1.0, 1.0], [5.0]]) for pair in pairs]
    assert all(one != other for one, other in itertools.combinations(found, 2))
