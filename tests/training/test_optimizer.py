"""An optimizer advances its own learning rate with each update that it makes."""

import contextlib
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from labkit import RunConfig, run, strategies, train_with
from labkit.strategies.traits import Division
from labkit.training.optimizers import optimizer_maker, schedule_of, try_optimizer

SMALL = {"train_size": 23, "batch_size": 9, "epochs": 4, "model": "mlp", "dtype": "float64"}
SCHEDULED = SMALL | {"lr_schedule": "cosine", "warmup_epochs": 0.5}


def overflowing(comm, scales):
    """The number of updates after each step whose loss is multiplied by one of ``scales``."""
    strategy, found = strategies.get("single")(amp="fp16"), []
    factor = [1.0]
    strategy.loss = lambda outputs, targets: (
        factor[0] * functional.cross_entropy(outputs, targets, reduction="sum")
    )
    config = RunConfig(**SCHEDULED | {"dtype": "float32"})
    strategy.setup(comm, nn.Linear(6, 3), optimizer_maker(config, None, strategy, 23))
    inputs, targets = torch.ones(4, 6), torch.tensor([0, 1, 2, 0])
    for factor[0] in scales:
        strategy.step(inputs, targets, 4)
        found.append(schedule_of(strategy.optimizer).update)
    return found


def test_an_update_that_overflows_does_not_advance_the_schedule():
    scales = [1.0, 1e38, 1.0, float("inf"), 1.0]
    assert run(overflowing, scales, world_size=1).values == [[1, 1, 2, 2, 3]]


def biased():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3))


def with_empty():
    model = biased()
    model[3].empty = nn.Parameter(torch.zeros(0))
    return model


def decayed_by_dimension(parameters):
    matrices = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=0.05)


def first_faster(parameters):
    groups = [{"params": parameters[:1], "lr": 0.2}, {"params": parameters[1:]}]
    return torch.optim.SGD(groups, lr=0.02)


class ByNorm(torch.optim.SGD):
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad /= 1 + parameter.grad.norm()
        return super().step(closure)


def decays_slowly(parameters):
    groups = [{"params": [p], "weight_decay": 1e-4 * (p.dim() > 1)} for p in parameters]
    return torch.optim.SGD(groups, lr=1e-3)


ELEMENTWISE = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "foreach": partial(torch.optim.AdamW, foreach=True, amsgrad=True),
    "nadam": partial(torch.optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "rprop": torch.optim.Rprop,
    "adadelta": torch.optim.Adadelta,
    "named": lambda parameters: torch.optim.Adam([(str(id(p)), p) for p in parameters]),
}
# What sees which parts: flat ones, rows of parameters, some of the parameters.
SEES = {
    "dimensions": (decayed_by_dimension, Division.ELEMENTS),
    "a slow decay": (decays_slowly, Division.ELEMENTS),
    "positions": (first_faster, Division.ELEMENTS | Division.LAYERS),
    "norms": (partial(ByNorm, lr=0.1), Division.ELEMENTS | Division.ROWS),
    "matrices": (torch.optim.Adafactor, Division.ELEMENTS | Division.ROWS),
    "a few": (lambda p: torch.optim.SGD(list(p)[:1]), Division.ELEMENTS | Division.LAYERS),
}


LAYERS_AND_ROWS = Division.LAYERS | Division.ROWS


@pytest.mark.parametrize("part", [*Division, LAYERS_AND_ROWS, Division.NONE])
def test_an_optimizer_is_refused_where_it_changes_parts_otherwise_than_the_whole(part):
    for name, make in ELEMENTWISE.items():
        assert try_optimizer(name, make, with_empty(), "a technique", part, 0) == ""
    for name, (make, seen) in SEES.items():
        if part & seen:
            with pytest.raises(ValueError, match="would not equal one device"):
                try_optimizer(name, make, biased(), "a technique", part, 0)
        else:
            try_optimizer(name, make, biased(), "a technique", part, 0)


def of_another_model(parameters):
    return torch.optim.SGD(biased().parameters(), lr=0.1)


WRONG = {
    "another model's": (of_another_model, "0 are among the 6"),
    "an object": (of_another_model([]), "not callable"),
    "a pair": (lambda p: (torch.optim.SGD(p), None), "returned a tuple"),
    "nothing": (lambda p: None, "returned a NoneType"),
    "needs a closure": (torch.optim.LBFGS, "closure"),
    "needs sparse gradients": (torch.optim.SparseAdam, "and ddp has dense ones"),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_optimizer_that_would_train_nothing_is_refused(case):
    optimizer, message = WRONG[case]
    data = torch.zeros(8, 6), torch.zeros(8, dtype=torch.int64)
    with pytest.raises(ValueError, match=message):
        train_with("ddp", world_size=2, model=biased(), dataset=data, optimizer=optimizer)


def test_a_part_of_the_parameters_may_be_trained_and_is_said():
    few = SEES["a few"][0]
    assert "1 of 6" in try_optimizer("few", few, biased(), "ddp", Division.NONE, 0)


class Remembering(torch.optim.SGD):
    """Changes something in each step; has constants, parameters and a scheduler in attributes."""

    def __init__(self, parameters, change):
        super().__init__(parameters, lr=0.1)
        self.change, self.momentum, self.average = change, {}, None
        self.known, self.weights = list(parameters), [torch.ones(3), torch.zeros(2, 2)]
        self.scheduler = torch.optim.lr_scheduler.StepLR(self, 1)

    def step(self, closure=None):
        self.change(self)
        return super().step(closure)


def remembers_gradients(optimizer):
    for parameter in optimizer.known:
        optimizer.momentum[parameter] = parameter.grad.clone()


def counts_in_state(optimizer):
    optimizer.state["steps"] = optimizer.state.get("steps", 0) + 1


def keeps_a_vector_in_a_group(optimizer):
    group = optimizer.param_groups[0]
    group["norms"] = group.get("norms", torch.zeros(2)) + 1


def makes_a_tensor(optimizer):
    optimizer.average = torch.tensor(1.0)


def keeps_a_pair_by_parameter(optimizer):
    optimizer.state[optimizer.known[0]]["pair"] = (1, 2)


def counts_and_lists(optimizer):
    """All of it is kept."""
    optimizer.average = [*(optimizer.average or []), 1.0]
    optimizer.param_groups[0]["count"] = len(optimizer.average)


NOT_KEPT = {
    remembers_gradients: "its attribute momentum",
    counts_in_state: r"state\['steps'\]",
    keeps_a_vector_in_a_group: "norms in param_groups",
    makes_a_tensor: "its attribute average",
    keeps_a_pair_by_parameter: "a checkpoint holds tensors",
}


@pytest.mark.parametrize("change", [*NOT_KEPT, counts_and_lists], ids=lambda f: f.__name__)
def test_what_no_checkpoint_would_hold_is_refused_with_checkpoints(change):
    for is_saved in (True, False):
        expected = contextlib.nullcontext()
        if is_saved and change in NOT_KEPT:
            expected = pytest.raises(ValueError, match=NOT_KEPT[change])
        make = partial(Remembering, change=change)
        with expected:
            try_optimizer("mine", make, biased(), "ddp", Division.NONE, 0, is_saved=is_saved)
