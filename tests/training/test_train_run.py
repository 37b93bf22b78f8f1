"""A training run: named devices, counted bytes, seconds by phase, batch statistics of shares."""

import pytest
import torch
from odd_models import (
    in_turn,
    seeded,
    some_batches,
    train_by_hand,
    with_batch_norm,
    with_batch_norm_over_pixels,
)
from ranks import travel_by_value
from torch import nn
from torch.nn import functional

from labkit import run, strategies, train_with
from labkit.costs.traffic import ring_all_reduce_cost
from labkit.training.result import checksum
from labkit.workload.samples import share

travel_by_value(__name__)

# 107 = 3 x 35 + 2: batches that do not divide, and a last one of fewer samples than ranks.
SMALL = {"epochs": 1, "train_size": 107, "lr": 0.02}


def test_named_devices_are_those_of_the_ranks():
    settings = SMALL | {"model": "mlp"}
    named = train_with("ring_all_reduce", devices=["cpu", "cpu"], **settings)
    assert (named.config.world_size, named.config.devices) == (2, "cpu,cpu")
    plain = train_with("ring_all_reduce", world_size=2, device="cpu", **settings)
    assert named.bytes_sent == plain.bytes_sent
    assert named.difference_from(plain) == 0.0


def test_bytes_and_messages_of_a_run_equal_the_formula():
    result = train_with("ring_all_reduce", world_size=3, batch_size=35, **SMALL)
    parameters = sum(tensor.numel() for tensor in result.state.values())
    costs = [ring_all_reduce_cost(parameters, 4, 3, rank) for rank in range(3)]
    steps = 4
    assert result.bytes_sent == [steps * cost.num_bytes for cost in costs]
    assert result.messages == [steps * cost.messages for cost in costs]
    assert result.replicas_agree
    alone = train_with("single", batch_size=35, **SMALL)
    assert result.difference_from(alone) < result.tolerance(alone)
    assert result.test_accuracy == alone.test_accuracy


# Models that a course meets sooner or later, trained by hand through the strategy protocol.

RING = strategies.get("ring_all_reduce")
# The last batch has two samples for three ranks: BatchNorm's counter then differs.
SAT_OUT = some_batches((6, 4, 2))


@pytest.fixture(scope="module")
def by_hand():
    """By number of ranks and name, what each rank ends with: one run for each number of ranks."""
    calls = {
        2: {"batch norm": (RING, with_batch_norm, some_batches((8,)))},
        3: {"sat out": (RING, with_batch_norm_over_pixels, SAT_OUT)},
    }
    found = {}
    for ranks, some in calls.items():
        values = run(in_turn, train_by_hand, some, world_size=ranks).values
        found |= {(ranks, name): [states[name] for states in values] for name in some}
    return found


def test_batch_norm_normalises_by_share_and_keeps_the_first_ranks_statistics(by_hand):
    """A step uses the share's own statistics; all ranks end with the first one's running ones."""
    states = by_hand[2, "batch norm"]
    assert checksum(states[0]) == checksum(states[1])

    ((inputs, targets),) = some_batches((8,))
    model = seeded(with_batch_norm)
    halves = [model[0](half) for half in inputs.split(4)]
    torch.testing.assert_close(states[0]["1.running_mean"], 0.1 * halves[0].mean(dim=0))
    for half, target in zip(inputs.split(4), targets.split(4)):
        functional.cross_entropy(model(half), target, reduction="sum").div(8).backward()
    updated = model[2].weight - 0.1 * model[2].weight.grad
    torch.testing.assert_close(states[0]["2.weight"], updated.detach())


def test_replicas_agree_though_a_rank_sat_a_batch_out(by_hand):
    states = by_hand[3, "sat out"]
    assert len({checksum(state) for state in states}) == 1
    assert states[2]["1.num_batches_tracked"] == len(SAT_OUT)


def test_a_nan_of_an_earlier_step_does_not_stay_in_an_empty_share():  # row 12
    def steps(comm, make_strategy):
        strategy = make_strategy()
        model = nn.Linear(1, 2)
        strategy.setup(comm, model, lambda p: torch.optim.SGD(p, lr=0.0))
        for value in (float("nan"), 1.0):
            inputs, targets = torch.full((1, 1), value), torch.tensor([0])
            mine = share(torch.arange(1), *strategy.share())
            strategy.step(inputs[mine], targets[mine], 1)
            with torch.no_grad():
                finite = bool(torch.isfinite(model.weight.grad).all())
                model.weight.fill_(1.0)
                model.bias.zero_()
        return finite

    assert run(steps, RING, world_size=2).values == [True, True]
