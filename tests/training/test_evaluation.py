"""What an epoch reports: the same for any number of ranks, and what a plain loop finds."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from labkit import RunConfig, run
from labkit.training.loop import fit
from labkit.training.resolve import Own, make_strategy
from labkit.workload.samples import batch_slices, epoch_order

NUMBERS = ("loss", "train_accuracy", "test_accuracy", "test_loss")
# Batches of 5, 5 and 1, and 3 held-out samples: fewer than ranks, and shares that differ.
GENERATOR = torch.Generator().manual_seed(3)
TRAIN = torch.randn(11, 6, generator=GENERATOR), torch.arange(11) % 7
TEST = torch.randn(3, 6, generator=GENERATOR), torch.tensor([5, 0, 2])
STRATEGIES = [("ddp", {}), ("ring_all_reduce", {"accumulate": 2}), ("parameter_server", {})]
STRATEGIES += [("parameter_server", {"servers": 2}), ("model_parallel", {})]
STRATEGIES += [("pipeline", {"micro_batches": 2})]
SETTINGS = {"batch_size": 5, "dtype": "float64", "epochs": 2}


def chain():
    torch.manual_seed(0)
    layers = nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 7)
    return nn.Sequential(*layers)


class Picky(nn.Sequential):
    """It takes no empty batch, as a model with a reshape to [n, -1]."""

    def __init__(self):
        super().__init__(*chain())

    def forward(self, inputs):
        return super().forward(inputs.reshape(len(inputs), -1))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.3)


def reports(comm):
    found = {}
    for strategy, options in STRATEGIES if comm.world_size > 1 else [("single", {})]:
        if options.get("servers", 0) < comm.world_size:
            make = chain if strategy in ("model_parallel", "pipeline") else Picky
            config = RunConfig(strategy, comm.world_size, **SETTINGS, **options)
            own = Own(model=make, dataset=(TRAIN, TEST), optimizer=sgd)
            found[strategy, *options] = fit(
                comm, config, make_strategy(config, own_parts=own), False, own
            )
    return found


@pytest.fixture(scope="module")
def alone():
    return run(reports, world_size=1).values[0]["single",]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_number_is_that_of_one_device_on_every_rank(alone, world_size):
    for by_rank in run(reports, world_size=world_size).values:
        for name, report in by_rank.items():
            for row, expected in zip(report.epochs, alone.epochs, strict=True):
                like = {number: expected[number] for number in NUMBERS}
                assert {n: row[n] for n in NUMBERS} == pytest.approx(like, rel=1e-10), name


def test_the_numbers_are_those_that_a_plain_loop_finds(alone):
    """Trained by hand, on one device: each sample is judged where its gradient is computed."""
    model = chain().double()
    optimizer = sgd(model.parameters())
    inputs, targets = TRAIN[0].double(), TRAIN[1]
    for epoch, row in enumerate(alone.epochs):
        right, total = 0, 0.0
        for batch in batch_slices(epoch_order(11, epoch=epoch, seed=0), 5):
            outputs = model(inputs[batch])
            right += int((outputs.argmax(dim=1) == targets[batch]).sum())
            loss = functional.cross_entropy(outputs, targets[batch])
            total += loss.item() * len(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        outputs = model(TEST[0].double())
        test_loss = functional.cross_entropy(outputs, TEST[1]).item()
        accuracy = (outputs.argmax(dim=1) == TEST[1]).double().mean().item()
        due = dict(zip(NUMBERS, (total / 11, right / 11, accuracy, test_loss)))
        assert {name: row[name] for name in NUMBERS} == pytest.approx(due, rel=1e-10)
