"""PyTorch's pipelines on our stages: one device's parameters, and nothing computed besides."""

from functools import partial

import pytest
import torch
from ranks import travel_by_value
from torch import nn

from labkit import run
from labkit.strategies.builtin.pipeline import TorchModelParallel, TorchPipeline
from labkit.strategies.single import Single
from labkit.training.state import checksum, largest_difference

pytestmark = pytest.mark.slow

travel_by_value(__name__)

# Of four micro-batches: one that divides, 2 + 2 + 2 + 1, fewer samples than micro-batches.
SIZES = (8, 7, 3, 1)
# Of models with seven layers, by number of stages.
SPLIT_POINTS = {1: (), 2: (3,), 3: (2, 5), 4: (1, 3, 6)}


def conv_net():
    convolutions = [nn.Conv2d(channels, 3, 3, padding=1) for channels in (1, 3)]
    first, second = convolutions
    pool, classify = nn.AvgPool2d(2), nn.Linear(12, 5)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), pool, nn.Flatten(), classify)


def frozen_at_first():
    model = conv_net()
    model[0].requires_grad_(False)
    return model


def with_batch_norm():
    model = conv_net()
    model[1], model[3] = nn.BatchNorm2d(3), nn.BatchNorm2d(3)
    return model


def tied():
    first, second, classify = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)
    second.weight = first.weight
    return nn.Sequential(
        nn.Flatten(), first, nn.Tanh(), second, nn.Tanh(), nn.Identity(), classify
    )


def bare_at_both_ends():
    """On four stages, the first and the last have no parameters; the last works in place, and so
    hands on the very tensor that it gets."""
    first, second, third = nn.Linear(16, 8), nn.Linear(8, 8), nn.Linear(8, 5)
    rectify = nn.LeakyReLU(0.1, inplace=True)
    return nn.Sequential(nn.Flatten(), first, nn.Tanh(), second, nn.Tanh(), third, rectify)


def train_by_hand(comm, make_strategy, make_model):
    """(state, losses, logits) of a few float64 steps; the logits after the last one."""
    torch.manual_seed(0)
    strategy, losses = make_strategy(), []
    strategy.setup(comm, make_model().double(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    for size in SIZES:
        inputs, targets = torch.randn(size, 1, 4, 4).double(), torch.randint(5, (size,))
        losses.append(strategy.step(inputs, targets, size).item())
    return strategy.full_state(), losses, strategy.predict(inputs)


def all_by_hand(comm, cases):
    return [train_by_hand(comm, *case) for case in cases]


def assert_equals(ranks, alone):
    """The stages' parameters are those of one device, on every rank; the last one has the rest."""
    state, losses, logits = alone
    assert len({checksum(rank[0]) for rank in ranks}) == 1
    assert largest_difference(ranks[-1][0], state) < 1e-10
    assert ranks[-1][1] == pytest.approx(losses, rel=1e-10)
    torch.testing.assert_close(ranks[-1][2], logits)


@pytest.fixture(scope="module")
def alone():
    """By model and number of micro-batches: one device that accumulates their gradients.

    So its batch statistics are those of a micro-batch, too.
    """
    cases = [(model, 4) for model in (conv_net, with_batch_norm, frozen_at_first, tied)]
    cases += [(bare_at_both_ends, 4), (with_batch_norm, 1)]
    made = [(partial(Single, accumulate=count), model) for model, count in cases]
    return dict(zip(cases, run(all_by_hand, made, world_size=1).values[0]))


@pytest.mark.parametrize(
    ("world_size", "models", "transport"),
    [
        (1, (conv_net, with_batch_norm), "auto"),
        (2, (conv_net, tied), "gloo"),
        (3, (conv_net, frozen_at_first), "auto"),
        (4, (with_batch_norm, bare_at_both_ends), "auto"),
    ],
)
def test_equals_one_device(world_size, models, transport, alone):
    pipeline = partial(TorchPipeline, SPLIT_POINTS[world_size], 4)
    cases = [(partial(pipeline, name), model) for name in ("gpipe", "1f1b") for model in models]
    # Whole batches: BatchNorm's statistics are those of one device.
    cases.append((partial(TorchModelParallel, SPLIT_POINTS[world_size]), with_batch_norm))
    ranks = run(all_by_hand, cases, world_size=world_size, transport=transport).values
    for case, (make, model) in enumerate(cases):
        count = 1 if make.func is TorchModelParallel else 4
        assert_equals([rank[case] for rank in ranks], alone[model, count])


class Counts(nn.Identity):
    """Remembers the sizes of the batches that it has seen."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, inputs):
        self.seen.append(len(inputs))
        return super().forward(inputs)


def sizes_seen(comm, sizes):
    model = frozen_at_first().insert(3, Counts()).insert(1, Counts())
    strategy = TorchPipeline((3,), 4, "1f1b")
    strategy.setup(comm, model, lambda p: torch.optim.SGD(p, lr=0.1))
    for size in sizes:
        strategy.step(torch.randn(size, 1, 4, 4), torch.randint(5, (size,)), size)
    (counts,) = [layer for layer in strategy.module if isinstance(layer, Counts)]
    return counts.seen


def test_layers_see_no_empty_rows_and_every_micro_batch_is_in_the_trace():
    result = run(sizes_seen, (7, 8, 3), world_size=2)
    assert result.values == [[2, 2, 2, 1, 2, 2, 2, 2, 1, 1, 1]] * 2
    for rank in range(2):
        for kind in ("forward", "backward"):
            assert len(result.trace.of(rank, kind)) == 4 + 4 + 3
