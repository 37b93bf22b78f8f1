"""A training run: named devices, counted bytes, seconds by phase, batch statistics of shares."""

import torch
from ranks import travel_by_value
from torch import nn

from labkit import run, strategies, train_with
from labkit.costs.traffic import ring_all_reduce_cost
from labkit.workload.samples import share

travel_by_value(__name__)

# 107 = 3 x 35 + 2: batches that do not divide, and a last one of fewer samples than ranks.
SMALL = {"epochs": 1, "train_size": 107, "lr": 0.02}


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


RING = strategies.get("ring_all_reduce")


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
