"""What a step leaves on a rank whose next share is empty."""

import torch
from torch import nn

from labkit import run, strategies
from labkit.workload.samples import share


def test_a_nan_of_an_earlier_step_does_not_stay_in_an_empty_share():  # row 12
    def steps(comm, make_strategy):
        strategy = make_strategy()
        model = nn.Linear(1, 2)
        strategy.setup(comm, model, lambda p: torch.optim.SGD(p, lr=0.0))
        for value in (float("nan"), 1.0):
            inputs, targets = torch.full((1, 1), value), torch.tensor([0])
            mine = share(torch.arange(1), *strategy.share_index())
            strategy.step(inputs[mine], targets[mine], 1)
            with torch.no_grad():
                finite = bool(torch.isfinite(model.weight.grad).all())
                model.weight.fill_(1.0)
                model.bias.zero_()
        return finite

    assert run(steps, strategies.get("ring_all_reduce"), world_size=2).values == [True, True]
