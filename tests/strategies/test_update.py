"""Clipping, mixed precision and accumulation in every technique, against one device.

One device is written out here in plain PyTorch where that is possible, not taken from labkit.
"""

import itertools
import math
from functools import partial

import pytest
import torch
from odd_models import sgd, some_batches
from ranks import travel_by_value
from torch import nn

from labkit import run, strategies
from labkit.strategies.base import OwnPaceStrategy
from labkit.strategies.model_parallel_one_process import ModelParallelOneProcess
from labkit.training.state import checksum, largest_difference
from labkit.workload.sampling import share

travel_by_value(__name__)

TORCH_DDP = strategies.get("ddp", builtin=True)
# Of models with seven layers, by number of stages.
SPLITS = {1: (), 2: (3,), 3: (2, 5), 4: (1, 3, 5)}
# The last norm clips some of the batches, see the test.
NEVER, ALWAYS, SOMETIMES = None, 1e-3, 0.75
BATCHES = (7, 5, 1, 9)


class Spare(nn.Module):
    """A layer with a parameter that forward does not use: its gradient is missing."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(6, 6), nn.Linear(2, 3)

    def forward(self, inputs):
        return self.used(inputs)


def odd():
    """Seven layers with tied and frozen parameters, and missing gradients."""
    first, frozen = nn.Linear(6, 6), nn.Linear(6, 6)
    tied = nn.Linear(6, 6)
    tied.weight = first.weight
    frozen.requires_grad_(False)
    return nn.Sequential(first, nn.Tanh(), frozen, tied, nn.Tanh(), Spare(), nn.Linear(6, 6))


def untied():
    """Without the tied one, which one process cannot have on two devices."""
    model = odd()
    model[3] = nn.Linear(6, 6)
    return model


def all_used():
    """PyTorch's DDP refuses missing gradients, unless it is asked to search for them."""
    model = odd()
    model[5] = nn.Linear(6, 6)
    return model


def model_of(make):
    """The model that a technique trains here, in float64."""
    own = {ModelParallelOneProcess: untied, TORCH_DDP: all_used}
    made = own.get(make.func, odd)
    return partial(wide, made)


def wide(make_model):
    return make_model().double()


def technique(name, builtin=False, **options):
    return partial(strategies.get(name, builtin=builtin), **options)


def in_one_process(world_size):
    """Techniques whose devices are those of one process, which is one rank."""
    replicas, stages = ("cpu",) * world_size, tuple(f"cpu:{i}" for i in range(world_size))
    yield technique("data_parallel", devices=replicas)
    yield technique("data_parallel", devices=replicas, accumulate=3)
    yield technique("data_parallel", builtin=True, devices=replicas, accumulate=2)
    yield partial(
        ModelParallelOneProcess, split_points=SPLITS[world_size], devices=stages, accumulate=2
    )
    if world_size == 1:
        yield technique("single", accumulate=2)


def on_ranks(world_size):
    for name, builtin in (("ring_all_reduce", False), ("ddp", False), ("ddp", True)):
        yield technique(name, builtin)
    for servers in range(1, max(2, world_size)):
        yield technique("parameter_server", servers=servers, accumulate=2)
    yield technique("parameter_server", builtin=True)
    cut = {"split_points": SPLITS[world_size]}
    yield technique("model_parallel", **cut, accumulate=3)
    yield technique("pipeline", **cut, micro_batches=3, schedule="1f1b")
    yield technique("pipeline", builtin=True, **cut, micro_batches=2)
    if world_size == 2:
        # A single worker is one device; the norm of its pushes is limited to clip_norm itself.
        yield technique("async_parameter_server")
        yield technique("async_parameter_server", builtin=True)
        yield technique("ddp", builtin=True, backend="labkit")


def name_of(make):
    options = ", ".join(f"{name}={value}" for name, value in make.keywords.items())
    return f"{make.func.__name__}({options})"


def train(comm, make_strategy, make_model, batches, clip_norm=None):
    """(full state, messages and bytes of the steps, the scaler's state) after some steps."""
    torch.manual_seed(0)
    strategy = make_strategy()
    strategy.clip_norm = clip_norm
    strategy.setup(comm, make_model(), sgd)
    before = comm.messages, comm.bytes_sent
    shares = []
    for inputs, targets in batches:
        mine = share(torch.arange(len(targets)), *strategy.share())
        shares.append((inputs[mine], targets[mine], len(targets)))
    if isinstance(strategy, OwnPaceStrategy):
        list(strategy.train(itertools.cycle(shares), len(batches), 1))
    else:
        for one in shares:
            strategy.step(*one)
    sent = comm.messages - before[0], comm.bytes_sent - before[1]
    strategy.end_epoch()
    state = strategy.full_state()
    strategy.close()
    return state, sent, strategy.scaler.state_dict()


def train_each(comm, cases):
    return {name: train(comm, *case) for name, case in cases.items()}


def plainly(make_model, batches, clip_norm=None):
    """(state, norms) of one device in plain PyTorch; a missing gradient counts as zeros."""
    torch.manual_seed(0)
    model, norms = make_model(), []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = sgd(trained)
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norms.append(nn.utils.clip_grad_norm_(trained, clip_norm or math.inf).item())
        optimizer.step()
    return model.state_dict(), norms


@pytest.fixture(scope="module")
def clipped():
    """By number of ranks, then case, what each rank ends with: one run for each number."""
    batches, found = some_batches(BATCHES), {}
    for world_size in (1, 2, 3, 4):
        for ranks, makes in ((1, in_one_process(world_size)), (world_size, on_ranks(world_size))):
            cases = {
                (name_of(make), clip_norm): (make, model_of(make), batches, clip_norm)
                for make in makes
                for clip_norm in (NEVER, ALWAYS, SOMETIMES)
            }
            values = run(train_each, cases, world_size=ranks, device="cpu").values
            for key, (make, *_) in cases.items():
                found[world_size, *key] = make, [rank[key] for rank in values]
    return found


def test_the_norms_are_such_that_all_steps_clip_or_some():
    for make in (odd, untied, all_used):
        norms = plainly(partial(wide, make), some_batches(BATCHES), SOMETIMES)[1]
        assert min(norms) < 0.9 * SOMETIMES < 1.1 * SOMETIMES < max(norms)


@pytest.mark.parametrize("clip_norm", [ALWAYS, SOMETIMES])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_clipping_equals_one_device(clipped, world_size, clip_norm):
    cases = [case for key, case in clipped.items() if key[::2] == (world_size, clip_norm)]
    for make, ranks in cases:
        state, _ = plainly(model_of(make), some_batches(BATCHES), clip_norm)
        assert len({checksum(rank[0]) for rank in ranks}) == 1, name_of(make)
        assert largest_difference(ranks[0][0], state) < 1e-10, name_of(make)
    assert len(cases) > 10
