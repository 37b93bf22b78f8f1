"""What an epoch reports: the same for any number of ranks, and what a plain loop finds."""

import math
from collections import defaultdict

import pytest
import torch
from ranks import travel_by_value
from torch import nn
from torch.nn import functional

from labkit import RunConfig, run, train_with
from labkit.training.loop import fit
from labkit.training.resolve import Own, make_strategy
from labkit.training.result import largest_difference

travel_by_value(__name__)

NUMBERS = ("loss", "train_accuracy", "test_accuracy", "test_loss")
# Batches of 5, 5 and 1, and 3 held-out samples: fewer than ranks, and shares that differ.
GENERATOR = torch.Generator().manual_seed(3)
TRAIN = torch.randn(11, 6, generator=GENERATOR), torch.arange(11) % 7
TEST = torch.randn(3, 6, generator=GENERATOR), torch.tensor([5, 0, 2])
STRATEGIES = [
    ("data_parallel", {}),
    ("ddp", {}),
    ("ring_all_reduce", {}),
    ("ring_all_reduce", {"accumulate": 2}),
    ("parameter_server", {}),
    ("parameter_server", {"servers": 2}),
    ("model_parallel", {}),
    ("pipeline", {"micro_batches": 2}),
]


class Picky(nn.Sequential):
    """It takes no empty batch, as a model with a reshape to [n, -1]."""

    def forward(self, inputs):
        return super().forward(inputs.reshape(len(inputs), -1))


def make_model():
    torch.manual_seed(0)
    return Picky(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 7))


def chain():
    return nn.Sequential(*make_model())


def own(strategy, lr=0.3):
    staged = strategy in ("model_parallel", "pipeline")
    return Own(
        model=chain if staged else make_model,
        dataset=(TRAIN, TEST),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr),
    )


def in_turn(comm, jobs):
    return {name: fit(comm, *job[:2], False, job[2]) for name, job in jobs.items()}


def job(strategy, world_size=1, **options):
    common = {"batch_size": 5, "dtype": "float64", "epochs": 2}
    config = RunConfig(strategy, world_size, **common, **options)
    return config, make_strategy(config, own=own(strategy)), own(strategy)


@pytest.fixture(scope="module")
def trained():
    """The ranks' reports by place in STRATEGIES and world size: a run for each number of ranks."""
    jobs = defaultdict(dict)
    jobs[1]["single", 1] = job("single")
    for world_size in (1, 2, 3, 4):
        for place, (strategy, options) in enumerate(STRATEGIES):
            if options.get("servers", 0) < max(world_size, 2):
                ranks = 1 if strategy == "data_parallel" else world_size
                jobs[ranks][place, world_size] = job(strategy, world_size, **options)
    found = {}
    for ranks, some in jobs.items():
        values = run(in_turn, some, world_size=ranks).values
        found |= {name: [reports[name] for reports in values] for name in some}
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_number_is_that_of_one_device_on_every_rank(trained, world_size):
    (alone,) = trained["single", 1]
    due = alone.epochs
    for place, (strategy, _) in enumerate(STRATEGIES):
        reports = trained.get((place, world_size), ())
        assert len({report.checksum for report in reports}) <= 1
        for report in reports:
            if report.state is not None:
                assert largest_difference(report.state, alone.state) < 1e-10, strategy
            for row, expected in zip(report.epochs, due, strict=True):
                found = {name: row[name] for name in NUMBERS}
                like = {name: expected[name] for name in NUMBERS}
                assert found == pytest.approx(like, rel=1e-10), strategy
                assert list(row)[:3] == ["loss", "test_accuracy", "seconds"]


def test_the_numbers_are_those_that_a_plain_loop_finds(trained):
    """Trained by hand, on one device: each sample is judged where its gradient is computed."""
    from labkit.workload.samples import batch_slices, epoch_order

    model = make_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    inputs, targets = TRAIN[0].double(), TRAIN[1]
    for epoch, row in enumerate(trained["single", 1][0].epochs):
        right, total = 0, 0.0
        for batch in batch_slices(epoch_order(11, epoch=epoch, seed=0), 5):
            outputs = model(inputs[batch])
            right += int((outputs.argmax(dim=1) == targets[batch]).sum())
            loss = functional.cross_entropy(outputs, targets[batch])
            total += loss.item() * len(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            outputs = model(TEST[0].double())
        due = {
            "loss": total / 11,
            "train_accuracy": right / 11,
            "test_accuracy": (outputs.argmax(dim=1) == TEST[1]).double().mean().item(),
            "test_loss": functional.cross_entropy(outputs, TEST[1]).item(),
        }
        assert {name: row[name] for name in NUMBERS} == pytest.approx(due, rel=1e-10)
        assert 0 < row["train_accuracy"] < 1


def test_asynchronous_training_reports_the_same_numbers():
    """One worker that never waits is plain training, up to the order of additions."""
    settings = {"batch_size": 5, "dtype": "float64", "epochs": 2, "model": make_model}
    parts = {"dataset": (TRAIN, TEST), **settings}
    alone = train_with("single", **parts)
    result = train_with("async_parameter_server", world_size=2, **parts)
    for row, due in zip(result.epochs, alone.epochs, strict=True):
        # The server counts no hits.
        like = {name: due[name] for name in NUMBERS} | {"train_accuracy": math.nan}
        found = {name: row[name] for name in NUMBERS}
        assert found == pytest.approx(like, rel=1e-10, nan_ok=True)


def test_what_is_not_there_is_not_measured():
    few = {"model": lambda: nn.Linear(6, 4), "dataset": (TRAIN[0], TRAIN[1] % 4)}
    (row,) = train_with("single", **few).epochs
    assert 0 <= row["train_accuracy"] <= 1
    assert all(math.isnan(row[name]) for name in ("test_accuracy", "test_loss"))
    parts = {"dataset": ((TRAIN[0], torch.ones(11, 7)), (TEST[0], torch.ones(3, 7)))}
    (row,) = train_with("single", model=make_model, loss="mse_loss", **parts).epochs
    assert math.isnan(row["train_accuracy"])
    assert math.isfinite(row["test_loss"])
