"""A model cut into stages equals the model on one device, whatever is cut, and however."""

from functools import partial

import odd_models
import pytest
import torch
from fifo_transport import over_streams  # noqa: F401  (a fixture)
from odd_models import seeded, sgd
from ranks import travel_by_value
from torch import nn

from labkit import run, strategies
from labkit.costs.traffic import Cost, model_parallel_cost
from labkit.training.state import largest_difference

travel_by_value(__name__)

BATCHES = (7, 5, 1, 2)


def plain():
    hidden = (layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh()))
    return nn.Sequential(*hidden, nn.Linear(6, 4))


def tied():
    """Layers 0, 2 and 4 share a weight, 0 and 2 a bias as well."""
    model = plain()
    model[2] = model[0]
    model[4].weight = model[0].weight
    return model


def frozen_first():
    model = plain()
    model[:3].requires_grad_(False)
    return model


def frozen_last():
    model = plain()
    model[2:].requires_grad_(False)
    return model


class Turned(nn.Module):
    """Hands on a tensor that is not contiguous, and ignores its input's first feature."""

    def forward(self, inputs):
        return inputs[:, 1:].t().flip(0).t()


def not_contiguous():
    return nn.Sequential(nn.Linear(6, 7), Turned(), nn.Tanh(), nn.Linear(6, 4))


def in_place():
    """Stages that begin in place, on what they get or on a view of it."""
    first, second = (nn.LeakyReLU(0.1, inplace=True) for _ in range(2))
    views = nn.Unflatten(1, (2, 3)), nn.Flatten()
    return nn.Sequential(nn.Linear(6, 6), first, nn.Linear(6, 6), *views, second, nn.Linear(6, 4))


class Nearest(nn.Module):
    """Hands on whole numbers, and so no gradient comes back through it."""

    def forward(self, inputs):
        return inputs.argmax(1)


def whole_numbers():
    return nn.Sequential(
        nn.Linear(6, 6), nn.Tanh(), Nearest(), nn.Embedding(6, 6), nn.Linear(6, 4)
    )


def with_batch_norm():
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 4))


# model, by world size the split points
CASES = {
    "plain": (plain, {1: (), 2: (3,), 3: (2, 5), 4: (1, 2, 6)}),
    "tied": (tied, {1: (), 2: (1,), 3: (2, 4), 4: (1, 3, 5)}),
    "frozen first": (frozen_first, {1: (), 2: (2,), 3: (2, 3), 4: (1, 2, 5)}),
    "frozen last": (frozen_last, {1: (), 2: (3,), 3: (2, 4), 4: (1, 2, 5)}),
    "not contiguous": (not_contiguous, {1: (), 2: (2,), 3: (1, 2), 4: (1, 2, 3)}),
    "in place": (in_place, {1: (), 2: (1,), 3: (4, 6), 4: (1, 5, 6)}),
    "whole numbers": (whole_numbers, {1: (), 2: (3,), 3: (2, 3), 4: (1, 3, 4)}),
}
TECHNIQUES = {
    "model_parallel": {},
    "gpipe": {"micro_batches": 3},
    "1f1b": {"micro_batches": 3, "schedule": "1f1b"},
}


some_batches = partial(odd_models.some_batches, classes=4)


def train(comm, strategy, make_model, sizes=BATCHES):
    strategy.setup(comm, seeded(make_model), sgd)
    losses = [strategy.step(*batch, len(batch[1])).item() for batch in some_batches(sizes)]
    strategy.end_epoch()
    logits = strategy.predict(some_batches((5,))[0][0])
    return strategy.full_state(), losses, logits


def train_all(comm):
    return {
        (case, technique): train(comm, make(split_points[comm.world_size], **options), make_model)
        for case, (make_model, split_points) in CASES.items()
        for technique, options in TECHNIQUES.items()
        for make in [strategies.get("pipeline" if options else "model_parallel")]
    }


def train_alone(comm):
    single = strategies.get("single")
    return {case: train(comm, single(), make_model) for case, (make_model, _) in CASES.items()}


@pytest.fixture(scope="module")
def alone():
    return run(train_alone, world_size=1).values[0]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equal_to_one_device_on_every_rank(world_size, alone):
    ranks = run(train_all, world_size=world_size).values
    for case, technique in ranks[0]:
        state, losses, logits = alone[case]
        found = [rank[case, technique] for rank in ranks]
        for own_state, _, _ in found:
            assert largest_difference(own_state, state) < 1e-10, (case, technique)
        # The last stage has the losses and the logits, the others nothing.
        summed = [sum(own) for own in zip(*(own_losses for _, own_losses, _ in found))]
        assert summed == pytest.approx(losses, abs=1e-10), (case, technique)
        torch.testing.assert_close(found[-1][2], logits, atol=1e-10, rtol=0)
        assert all(own_logits is None for _, _, own_logits in found[:-1])


@pytest.mark.slow
@pytest.mark.usefixtures("over_streams")
@pytest.mark.parametrize("world_size", [3])
def test_over_a_stream_that_queues(world_size, alone):
    test_equal_to_one_device_on_every_rank(world_size, alone)


def train_batch_norm(comm):
    points = {2: (2,), 3: (1, 4)}[comm.world_size]
    sizes = (8, 9)
    whole = strategies.get("model_parallel")(points)
    states = {"whole": train(comm, whole, with_batch_norm, sizes)[0]}
    for schedule in ("gpipe", "1f1b"):
        pipeline = strategies.get("pipeline")(points, micro_batches=3, schedule=schedule)
        states[schedule] = train(comm, pipeline, with_batch_norm, sizes)[0]
    return states


def batch_norm_alone(comm):
    single = strategies.get("single")
    return [train(comm, single(accumulate=n), with_batch_norm, (8, 9))[0] for n in (1, 3)]


def test_batch_norm_sees_the_whole_batch_or_each_micro_batch():
    whole, by_micro_batch = run(batch_norm_alone, world_size=1).values[0]
    assert largest_difference(whole, by_micro_batch) > 1e-3
    for world_size in (2, 3):
        for states in run(train_batch_norm, world_size=world_size).values:
            assert largest_difference(states["whole"], whole) < 1e-10
            assert largest_difference(states["gpipe"], by_micro_batch) < 1e-10
            assert largest_difference(states["1f1b"], by_micro_batch) < 1e-10


def spent(comm):
    """By technique and model, what one step of 7 samples is counted as."""
    found = {}
    for technique, options in TECHNIQUES.items():
        for case in ("plain", "frozen first"):
            make_model, points = CASES[case]
            name = "pipeline" if options else "model_parallel"
            strategy = strategies.get(name)(points[comm.world_size], **options)
            strategy.setup(comm, seeded(make_model), sgd)
            before = comm.operations, comm.messages, comm.bytes_sent
            strategy.step(*some_batches((7,))[0], 7)
            after = comm.operations, comm.messages, comm.bytes_sent
            found[technique, case] = Cost(*(end - start for start, end in zip(before, after)))
    return found


def test_a_step_takes_the_operations_messages_and_bytes_of_the_formula():
    for rank, found in enumerate(run(spent, world_size=3).values):
        for (technique, case), cost in found.items():
            options = TECHNIQUES[technique]
            if technique == "gpipe":
                options = options | {"schedule": "gpipe"}
            # All layers hand on 6 float64; with layers 0 to 2 frozen, the last stage alone trains.
            first = 2 if case == "frozen first" else 0
            due = model_parallel_cost([48, 48], 7, rank, 3, first_trained=first, **options)
            assert cost == due, (technique, case, rank)


def train_words(comm, strategy):
    """A model that takes whole numbers."""
    torch.manual_seed(0)
    layers = [nn.Embedding(9, 6), nn.Flatten(), nn.Linear(18, 6), nn.Tanh(), nn.Linear(6, 4)]
    strategy.setup(comm, nn.Sequential(*layers).double(), sgd)
    words, targets = torch.randint(9, (5, 3)), torch.randint(4, (5,))
    losses = [strategy.step(words, targets, 5).item() for _ in range(2)]
    return strategy.full_state(), losses


def test_whole_numbers_may_enter():
    single = strategies.get("single")()
    pipeline = strategies.get("pipeline")((2,), 2)
    state, losses = run(train_words, single, world_size=1).values[0]
    for found, _ in (split := run(train_words, pipeline, world_size=2).values):
        assert largest_difference(found, state) < 1e-10
    assert split[-1][1] == pytest.approx(losses, rel=1e-10)


def held_bytes(comm):
    """By schedule, of 2 and of 6 micro-batches of 4 samples."""
    found = {}
    for schedule in ("gpipe", "1f1b"):
        for count in (2, 6):
            points = (2, 4)[: comm.world_size - 1]
            strategy = strategies.get("pipeline")(points, count, schedule)
            train(comm, strategy, plain, (4 * count,))
            found[schedule, count] = strategy.notes()["held_bytes"]
    return found


def test_fill_and_drain_holds_all_micro_batches_and_1f1b_no_more_than_stages_are_left():
    for found in run(held_bytes, world_size=3).values:
        assert found["gpipe", 6] == [3 * held for held in found["gpipe", 2]]
        # Stage s of 3 holds 3 - s micro-batches at most; of 2 there are no more.
        assert [a / b for a, b in zip(found["1f1b", 6], found["1f1b", 2])] == [1.5, 1, 1]
        assert found["1f1b", 6][0] < found["gpipe", 6][0]
    # Stage 0 keeps its input (6 numbers a sample), and what Linear hands Tanh, which keeps it.
    assert found["gpipe", 2][0] == 8 * 8 * (6 + 6)
