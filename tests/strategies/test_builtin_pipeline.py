"""PyTorch's pipelines on our stages: one device's parameters, and nothing computed besides."""

import os
import signal
from functools import partial

import pytest
import torch
from ranks import travel_by_value
from torch import nn

from labkit import WorkerError, run, train_with
from labkit.strategies.builtin.pipeline import TorchModelParallel
from labkit.strategies.builtin.pipeline import TorchPipeline
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


def train_by_hand(comm, make_strategy, make_model, sizes=SIZES):
    """(state, losses, logits) of a few float64 steps; the logits after the last one."""
    torch.manual_seed(0)
    strategy = make_strategy()
    model = make_model().double()
    strategy.setup(comm, model, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    losses = []
    for size in sizes:
        inputs, targets = torch.randn(size, 1, 4, 4).double(), torch.randint(5, (size,))
        losses.append(strategy.step(inputs, targets, size).item())
    strategy.end_epoch()
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
    for _, elsewhere, nothing in ranks[:-1]:
        assert set(elsewhere) == {0.0}
        assert nothing is None


@pytest.fixture(scope="module")
def alone():
    """By model: one device that accumulates the gradients of four micro-batches.

    So its batch statistics are those of a micro-batch, too.
    """
    models = (conv_net, with_batch_norm, frozen_at_first, tied, bare_at_both_ends)
    cases = [(partial(Single, accumulate=4), model) for model in models]
    return dict(zip(models, run(all_by_hand, cases, world_size=1).values[0]))


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
    ranks = run(all_by_hand, cases, world_size=world_size, transport=transport).values
    for case, (_, model) in enumerate(cases):
        assert_equals([rank[case] for rank in ranks], alone[model])


def test_one_micro_batch_is_model_parallel():
    """Whole batches: BatchNorm's statistics are those of one device."""
    (alone,) = run(train_by_hand, Single, with_batch_norm, world_size=1).values
    parallel = partial(TorchModelParallel, SPLIT_POINTS[3])
    assert_equals(run(train_by_hand, parallel, with_batch_norm, world_size=3).values, alone)


def test_the_training_loop_with_a_last_batch_that_does_not_divide():
    settings = {"model": "mlp", "train_size": 70, "batch_size": 32, "epochs": 2, "momentum": 0.9}
    alone = train_with("single", **settings)
    ours = [
        train_with("pipeline", builtin=True, world_size=3, schedule="1f1b", **settings),
        train_with("model_parallel", builtin=True, split_points="2,5", **settings),
    ]
    for result in ours:
        assert result.difference_from(alone) < result.tolerance(alone)
        assert result.replicas_agree
        assert result.bytes_sent is None
        assert result.test_accuracy == alone.test_accuracy
        assert result.epochs[-1]["loss"] == pytest.approx(alone.epochs[-1]["loss"], rel=1e-5)
    assert ours[1].notes["split_points"] == [2, 5]


class Counts(nn.Identity):
    """Remembers the sizes of the batches that it has seen."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, inputs):
        self.seen.append(len(inputs))
        return super().forward(inputs)


def sizes_seen(comm, sizes):
    model = conv_net().insert(3, Counts()).insert(1, Counts())
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    strategy = TorchPipeline((3,), 4, "1f1b")
    strategy.setup(comm, model, lambda p: torch.optim.SGD(p, lr=0.1))
    for size in sizes:
        strategy.step(torch.randn(size, 1, 4, 4), torch.randint(5, (size,)), size)
    (counts,) = [layer for layer in strategy.stage.module if isinstance(layer, Counts)]
    return counts.seen


def test_layers_see_no_empty_rows_and_every_micro_batch_is_in_the_trace():
    result = run(sizes_seen, (7, 8, 3), world_size=2)
    assert result.values == [[2, 2, 2, 1, 2, 2, 2, 2, 1, 1, 1]] * 2
    for rank in range(2):
        for kind in ("forward", "backward"):
            assert len(result.trace.of(rank, kind)) == 4 + 4 + 3


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="unknown schedule 'zigzag': choose one of gpipe, 1f1b"):
        TorchPipeline((1,), schedule="zigzag")


class Raises(nn.Module):
    def forward(self, inputs):
        raise ArithmeticError("the layer's own words")


def test_a_stage_that_raises_is_named_with_its_reason():
    model = partial(nn.Sequential, nn.Flatten(), nn.Linear(16, 5), nn.Identity(), Raises())
    with pytest.raises((WorkerError, ValueError), match="the layer's own words"):
        run(train_by_hand, partial(TorchPipeline, (2,)), model, world_size=2)


class Nearest(nn.Module):
    def forward(self, inputs):
        return inputs.argmax(1)


def whole_numbers(frozen):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 5), Nearest(), nn.Embedding(5, 5))
    model[:frozen].requires_grad_(False)
    return model


def test_whole_numbers_cross_a_cut_where_no_gradient_comes_back():
    with pytest.raises(WorkerError, match=r"split point 3 is torch.int64.*or use our own"):
        run(train_by_hand, partial(TorchPipeline, (1, 3)), partial(whole_numbers, 0), world_size=3)
    cases = partial(TorchPipeline, (3,)), partial(whole_numbers, 3)
    ranks = run(train_by_hand, *cases, world_size=2).values
    (alone,) = run(train_by_hand, Single, cases[1], world_size=1).values
    assert_equals(ranks, alone)


class Dies(nn.Module):
    def forward(self, inputs):
        if not inputs.is_meta:
            os.kill(os.getpid(), signal.SIGKILL)
        return inputs


def test_a_stage_that_is_killed_is_the_cause_and_not_the_others_lost_connections():
    model = partial(nn.Sequential, nn.Flatten(), nn.Linear(16, 5), Dies(), nn.Linear(5, 5))
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL in mid-run"):
        run(train_by_hand, partial(TorchPipeline, (2, 3)), model, world_size=3)
