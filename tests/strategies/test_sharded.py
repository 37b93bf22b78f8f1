"""Sharding: what is held and sent, to the byte; what is freed; tied layers; what is refused."""

import gc
import itertools

import pytest
import torch
from odd_models import Everything, seeded, some_batches
from one_device import beside_one_device, ours_or_theirs
from ranks import wait_until
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from labkit import RunConfig, run, train_with
from labkit.builtin.sharded import TorchSharded
from labkit.costs.memory import sharded_memory
from labkit.costs.traffic import sharded_cost
from labkit.strategies.sharded import Sharded
from labkit.training.resolve import make_strategy
from labkit.training.result import largest_difference
from labkit.workload.losses import CountedLoss, ShareLoss
from labkit.workload.transformer import gpt

# By optimizer, the numbers that it has per parameter, and the bytes that count its steps.
OPTIMIZERS = {torch.optim.SGD: (1, 0), torch.optim.Adam: (2, 4)}
STAGES = (1, 2, 3)


def tied_gpt():
    """Its head uses the embedding's weight, and no number of ranks divides its sizes."""
    return nn.Sequential(*gpt((5,), 7, width=6, num_heads=2, num_blocks=2))


def frozen_and_tied():
    model = tied_gpt()
    model[1].requires_grad_(False)
    return model


def optimizer_of(kind):
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {"eps": 0.1}
    return lambda parameters: kind(parameters, lr=0.05, **options)


DRAWN = torch.randint(7, (16, 6), generator=torch.Generator().manual_seed(2))
TEXTS = [(text[:, :-1], text[:, 1:]) for text in DRAWN.split((9, 5, 2))]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_memory_and_traffic_are_those_of_the_formulas_and_the_run_that_of_one_device(world_size):
    # Of all 24, five, others with each number of ranks.
    product = itertools.product(STAGES, (1, 2), OPTIMIZERS, (tied_gpt, frozen_and_tied))
    chosen = [*product][world_size::5]
    cases = []
    for stage, accumulate, kind, model in chosen:
        technique = ours_or_theirs("sharded", stage=stage, accumulate=accumulate)
        cases.append((technique, model, None, optimizer_of(kind)))
    found = beside_one_device(cases, TEXTS, TEXTS[0][0], world_size)
    for (stage, accumulate, kind, _), (by_rank, _) in zip(chosen, found, strict=True):
        for rank, trained in enumerate(by_rank):
            notes = trained.notes
            place = notes["flats"], stage, world_size, rank
            model = {name: notes[name] for name in ("uses", "trained")} | {"element_bytes": 8}
            states, counter_bytes = OPTIMIZERS[kind]
            due = sharded_memory(*place, **model, states=states, counter_bytes=counter_bytes)
            for moment, ledger in due.items():
                counted = {kind: notes["memory"][moment][kind][rank] for kind in ledger}
                assert counted == ledger, (place, moment)
            cost = sharded_cost(*place, **model, micro_batches=accumulate)
            assert trained.sent[-1] == (cost.messages, cost.num_bytes)


def alive(but=frozenset()):
    """By place, the bytes of each storage that a tensor has."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, nn.Parameter)]
    storages = (tensor.untyped_storage() for tensor in tensors)
    return {s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in but}


class Looks(nn.Module):
    """A layer that notes how many bytes of parameters there are in forward and in backward."""

    def __init__(self, found):
        super().__init__()
        self.linear, self.found = nn.Linear(6, 6), found

    def forward(self, inputs):
        self.found.append(self.whole())
        outputs = self.linear(inputs)
        outputs.register_hook(lambda _: self.found.append(self.whole()))
        return outputs

    def whole(self):
        return sum(1 for flat in self.found.flats if flat.full.untyped_storage().nbytes())


class Found(list):
    flats = ()


def looked(comm, stage):
    found, start = Found(), alive()
    model = nn.Sequential(*(Looks(found) for _ in range(5))).double()
    strategy = Sharded(stage=stage)
    strategy.setup(comm, model, optimizer_of(torch.optim.SGD))
    found.flats = strategy.flats
    for inputs, targets in some_batches((8, 8)):
        strategy.step(inputs, targets, len(targets))
    inputs = targets = None
    held = sum(strategy.live_bytes().values())
    # The thread that reduces may not have let go of the last gradient yet.
    wait_until(lambda: sum(alive(but=start).values()) == held, 10)
    return list(found), sum(alive(but=start).values()) - held


@pytest.mark.parametrize("stage", STAGES)
def test_nothing_is_held_that_is_not_counted_and_stage_3_has_two_layers_at_a_time(stage):
    for whole, uncounted in run(looked, stage, world_size=2).values:
        assert uncounted == 0
        # Its own and the next; of backward, a layer's hook sees what the layer before it had.
        # (In stage 1 these small layers are one unit.)
        there, back = (
            ([2, 2, 2, 2, 1], [1, 2, 2, 2, 2]) if stage == 3 else ([4 * stage - 3] * 5,) * 2
        )
        assert whole == [*there, *back] * 2


class Peak(TorchDispatchMode):
    """The most bytes of storages alive after an operation, but for those at its start."""

    def __init__(self):
        super().__init__()
        self.start, self.most = alive(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        outputs = function(*args, **(kwargs or {}))
        self.most = max(self.most, sum(alive(but=self.start).values()))
        return outputs


def set_up(comm, technique):
    """The peak of set-up beside the host's model, what is left, and the bytes of a unit."""
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8))).double()
    # The host's model stays alive, so that no new storage has an address of before.
    host = [parameter.untyped_storage() for parameter in model.parameters()]
    strategy = technique(stage=3)
    with Peak() as peak:
        strategy.setup(comm, model, optimizer_of(torch.optim.SGD))
    unit = sum(storage.nbytes() for storage in host) // 8
    return peak.most, sum(alive(but=peak.start).values()), unit


@pytest.mark.parametrize("technique", [Sharded, TorchSharded])
def test_set_up_of_stage_3_allocates_a_ranks_shards_and_one_unit(technique):
    for most, left, unit in run(set_up, technique, world_size=4, device="cpu").values:
        # Of eight units a quarter each, and for ours their gradients; FSDP adds a few numbers.
        assert 2 * unit <= left < 4.5 * unit
        assert most < left + 1.5 * unit


class Scaled(nn.Module):
    """A layer whose first parameter has no dimensions."""

    def __init__(self):
        super().__init__()
        self.factor, self.linear = nn.Parameter(torch.tensor(0.5)), nn.Linear(6, 6)

    def forward(self, inputs):
        return self.factor * self.linear(inputs)


def continued(comm, stage):
    """States after two steps with NAdam, and after one, loaded into another model, and one."""
    states = []
    saved = {}
    for begins in (0, 1):
        strategy = Sharded(stage=stage)
        strategy.loss = CountedLoss(ShareLoss.of(cross_entropy))
        strategy.setup(comm, seeded(lambda: nn.Sequential(Scaled())), torch.optim.NAdam)
        if begins:
            strategy.saved_state_class(strategy).restore(saved)
        for number, (inputs, targets) in list(enumerate(some_batches((8, 8))))[begins:]:
            ours = strategy.part_of(torch.arange(len(targets)))
            strategy.step(inputs[ours], targets[ours], len(targets))
            if number == 0:
                # (One rank, so that it has all of it.)
                saved = {
                    name: value.clone()
                    for name, value in strategy.saved_state_class(strategy).collect().items()
                }
        states.append(strategy.full_state())
    return states


@pytest.mark.parametrize("stage", [2, 3])
def test_a_state_without_dimensions_is_continued_beside_a_parameter_without(stage):
    whole, resumed = run(continued, stage, world_size=1).values[0]
    assert largest_difference(resumed, whole) == 0


def test_what_is_no_stage_or_no_chain_is_refused():
    with pytest.raises(ValueError, match=r"stage must be .* 3, got 4"):
        make_strategy(RunConfig("sharded", world_size=2, stage=4))
    with pytest.raises(ValueError, match="Everything cannot be cut into layers"):
        train_with("sharded", world_size=2, model=Everything, dataset=some_batches((9,))[0])
