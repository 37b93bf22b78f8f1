"""An optimizer advances its own learning rate, wherever a technique makes its updates."""

import itertools

import torch
from ranks import travel_by_value
from torch import nn
from torch.nn import functional

from labkit import RunConfig, run, strategies, train_with
from labkit.training.loop import fit
from labkit.training.resolve import Own, make_strategy, optimizer_maker, schedule_of
from labkit.training.result import largest_difference

travel_by_value(__name__)

SMALL = {"train_size": 23, "batch_size": 9, "epochs": 4, "model": "mlp", "dtype": "float64"}
SCHEDULED = SMALL | {"lr_schedule": "cosine", "warmup_epochs": 0.5}


def updates_made(comm, jobs):
    """By job: the report, and the number of the next update of each optimizer on this rank."""
    found = {}
    for name, (config, strategy, own) in jobs.items():
        counted = []

        def keeping(parameters, counted=counted, own=own):
            optimizer = own(parameters)
            counted.append(optimizer)
            return optimizer

        report = fit(comm, config, strategy, False, Own(optimizer=keeping))
        positions = [schedule_of(optimizer).update for optimizer in counted]
        found[name] = report, positions
    return found


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)


def test_an_own_optimizer_follows_where_servers_and_stages_make_its_updates():
    """4 epochs of 3 batches; of the last batch (5 samples) both workers have a share."""
    settings = SCHEDULED | {"world_size": 3, "optimizer": "sgd (own)"}
    names = ("parameter_server", "pipeline", "async_parameter_server")
    jobs = {}
    for name in names:
        for builtin in (False, True):
            config = RunConfig(name, builtin=builtin, **settings)
            jobs[name, builtin] = config, make_strategy(config, own=Own(optimizer=sgd)), sgd
    first, second, third = run(updates_made, jobs, world_size=3).values
    alone = train_with("single", optimizer=sgd, **SCHEDULED).state
    for name in itertools.product(names[:2], (False, True)):
        assert largest_difference(first[name][0].state, alone) < 1e-10
    for builtin in (False, True):
        assert [p[1] for p in (first["pipeline", builtin], third["pipeline", builtin])] == [
            [12]
        ] * 2
        server = "parameter_server", builtin
        assert (first[server][1], second[server][1]) == ([12], [])
        report, positions = first["async_parameter_server", builtin]
        assert positions == [len(report.notes["staleness"])] == [24]


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
