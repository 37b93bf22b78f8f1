"""What the checks of page 16 compare with: real Horovod-like and DDP runs, and real BatchNorm."""

import itertools

import pytest
import torch
from ranks import travel_by_value
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit
import labkit.horovod as hvd
from workbook.exercises import elsewhere
from workbook.exercises.elsewhere import GRADIENTS, STATISTICS, step_of
from workbook.exercises.elsewhere_training import (
    MISTAKES,
    Setting,
    differs,
    played,
    wrong_training,
)
from workbook.exercises.grader import Case
from workbook.exercises.programs import with_ddp, with_horovod

travel_by_value(__name__)

SHARES = ([1.0, 2.0, 6.0], [5.0, 7.0], [0.5, 0.25, -8.0])
MOMENTUM = 0.3
SEEDS = (3, 4)


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


def programs(comm):
    """What the page's two scripts leave, by seed and start."""
    found = []
    for seed, resumed in itertools.product(SEEDS, (False, True)):
        case = Case(comm.world_size, 0, seed=seed)
        horovods = elsewhere.trained(with_horovod.train, Setting(case, resumed), comm.rank)
        hvd.shutdown()
        with elsewhere._made_already():
            ddps = elsewhere.trained(with_ddp.train, Setting(case, resumed, 2), comm.rank)
        found.append((horovods, ddps))
    return found


def both(comm):
    return real_steps(comm), programs(comm)


@pytest.fixture(scope="module")
def ran():
    return labkit.run(both, world_size=3, device="cpu").values


def test_the_black_boxes_are_what_the_frameworks_do(ran):
    conventions = {
        "horovod": ("mean of means", "own"),
        "horovod, sum": ("sum of means", "own"),
        "ddp": ("mean of means", "rank 0"),
        "sync": ("mean of means", "whole batch"),
    }
    for name, convention in conventions.items():
        moved, means = zip(*(steps[name] for steps, _ in ran))
        due, kept = step_of(*convention, momentum=MOMENTUM)(SHARES)
        assert moved == pytest.approx([due] * 3, rel=1e-12), name
        assert means == pytest.approx(kept, rel=1e-12), name


def test_the_pages_scripts_are_what_ports_are_compared_with(ran):
    for number, (seed, resumed) in enumerate(itertools.product(SEEDS, (False, True))):
        case = Case(3, 0, seed=seed)
        settings = Setting(case, resumed), Setting(case, resumed, 2)
        for which, setting in enumerate(settings):
            ranks = [scripts[number][which] for _, scripts in ran]
            assert wrong_training([(setting, ranks)]) is None


def test_no_two_pairs_of_semantics_do_the_same():
    pairs = list(itertools.product(GRADIENTS, STATISTICS))
    found = [step_of(*pair)([[1.0, 1.0, 1.0], [5.0]]) for pair in pairs]
    assert all(one != other for one, other in itertools.combinations(found, 2))


@pytest.mark.parametrize("passes", [1, 2])
def test_every_named_mistake_changes_the_model(passes):
    settings = elsewhere.settings(Case(3, 0, seed=7), passes)
    for mistake in MISTAKES.values():
        pairs = [pair for s in settings for pair in zip(played(s, mistake), played(s))]
        assert any(differs("a state", one.state, other.state) for one, other in pairs), mistake


def test_the_trainings_have_what_a_port_may_stumble_over():
    for P, passes, seed in itertools.product((2, 3, 4), (1, 2), range(3)):
        for setting in elsewhere.settings(Case(P, 0, seed=seed), passes):
            *_, last = batches = setting.batches(0, 0)
            assert len(last) < setting.batch_size
            assert len(batches) % passes == 0
            assert len(setting.samples) % P
            states = [setting.model(rank).state_dict() for rank in (0, 1)]
            assert not any((states[0][n] == value).all() for n, value in states[1].items())
