"""What an epoch reports: the same for any number of ranks, and what a plain loop finds."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

from labkit import RunConfig, run
from labkit.training.loop import fit
from labkit.training.resolve import Own, resolve
from labkit.workload.samples import batch_slices, epoch_order

NUMBERS = ("loss", "train_accuracy", "test_accuracy", "test_loss")
# Batches of 5, 5 and 1, and 3 held-out samples: fewer than ranks, and shares that differ.
GENERATOR = torch.Generator().manual_seed(3)
TRAIN = torch.randn(11, 6, generator=GENERATOR), torch.arange(11) % 7
TEST = torch.randn(3, 6, generator=GENERATOR), torch.tensor([5, 0, 2])
# Of every second sample the target is ignored, and of the last batch, which is one sample.
IGNORED = TRAIN[1].clone()
IGNORED[::2] = -100
IGNORED[epoch_order(11, epoch=1, seed=0)[-1]] = -100
DATA = {
    "all judged": (TRAIN, TEST),
    "some ignored": ((TRAIN[0], IGNORED), (TEST[0], torch.tensor([5, -100, 2]))),
}
STRATEGIES = [("ddp", {}), ("ring_all_reduce", {"accumulate": 2}), ("parameter_server", {})]
STRATEGIES += [("parameter_server", {"servers": 2}), ("model_parallel", {})]
STRATEGIES += [("pipeline", {"micro_batches": 2}), ("sharded", {"stage": 2})]
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
    """By data, technique and options, what an epoch reports."""
    found = {}
    strategies = STRATEGIES if comm.world_size > 1 else [("single", {})]
    for data, (strategy, options) in itertools.product(DATA, strategies):
        if options.get("servers", 0) < comm.world_size:
            is_chain = strategy in ("model_parallel", "pipeline", "sharded")
            make = chain if is_chain else Picky
            config = RunConfig(strategy, comm.world_size, **SETTINGS, **options)
            own = Own(model=make, dataset=DATA[data], optimizer=sgd)
            technique, _ = resolve(config, own)
            report = fit(comm, config, technique, False, own)
            found[data, strategy, *options] = report
    return found


@pytest.fixture(scope="module")
def alone():
    return run(reports, world_size=1).values[0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_number_is_that_of_one_device_on_every_rank(alone, world_size):
    for by_rank in run(reports, world_size=world_size).values:
        for name, report in by_rank.items():
            expected_rows = alone[name[0], "single"].epochs
            for row, expected in zip(report.epochs, expected_rows, strict=True):
                like = {number: expected[number] for number in NUMBERS}
                assert {n: row[n] for n in NUMBERS} == pytest.approx(like, rel=1e-10), name


@pytest.mark.parametrize("data", DATA)
def test_the_numbers_are_those_that_a_plain_loop_finds(alone, data):
    """Trained by hand, on one device: each sample is judged where its gradient is computed."""
    (inputs, targets), (test_inputs, test_targets) = DATA[data]
    model = chain().double()
    optimizer = sgd(model.parameters())
    inputs = inputs.double()
    for epoch, row in enumerate(alone[data, "single"].epochs):
        right, total = 0, 0.0
        for batch in batch_slices(epoch_order(11, epoch=epoch, seed=0), 5):
            outputs = model(inputs[batch])
            right += int((outputs.argmax(dim=1) == targets[batch]).sum())
            loss = functional.cross_entropy(outputs, targets[batch], reduction="sum")
            total += loss.item()
            optimizer.zero_grad()
            # All targets of a batch may be ignored.
            (loss / max(1, int((targets[batch] != -100).sum()))).backward()
            optimizer.step()
        outputs = model(test_inputs.double())
        test_loss = functional.cross_entropy(outputs, test_targets).item()
        judged = int((targets != -100).sum())
        accuracy = (outputs.argmax(dim=1) == test_targets)[test_targets != -100]
        numbers = total / judged, right / judged, accuracy.double().mean().item(), test_loss
        due = dict(zip(NUMBERS, numbers))
        assert {name: row[name] for name in NUMBERS} == pytest.approx(due, rel=1e-10)
