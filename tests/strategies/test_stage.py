"""A model cut into stages: batch statistics, messages, held activations, and the trace."""

import copy
import random

import numpy as np
import pytest
import torch
from odd_models import seeded, sgd, some_batches
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from labkit import run, strategies
from labkit.costs.traffic import Cost, model_parallel_cost
from labkit.schedules.pipeline import PIPELINES, Hop, Message, Pipelining, gpipe
from labkit.strategies.hops import run_hop
from labkit.strategies.layer_graphs import LayerGraphs
from labkit.training.resolve import find_technique
from labkit.training.result import largest_difference
from labkit.workload.layers import HeldBytes
from labkit.workload.samples import seed_all

TECHNIQUES = {
    "model_parallel": {},
    "gpipe": {"micro_batches": 3},
    "1f1b": {"micro_batches": 3, "schedule": "1f1b"},
}
OURS_ALONE = {
    "zero_bubble": {"micro_batches": 3, "schedule": "zero_bubble"},
    "recompute": {"micro_batches": 3, "recompute": True},
    "both": {"micro_batches": 3, "schedule": "zero_bubble", "recompute": True},
    "own": {"micro_batches": 3, "schedule": "own"},
    "own again": {"micro_batches": 3, "schedule": "own", "recompute": True},
}


def made(technique, points, builtin=False):
    name = "model_parallel" if technique == "model_parallel" else "pipeline"
    options = TECHNIQUES.get(technique) or OURS_ALONE.get(technique, {})
    return find_technique(name, builtin=builtin)(points, **options)


def plain():
    hidden = (layer for _ in range(3) for layer in (nn.Linear(6, 6), nn.Tanh()))
    return nn.Sequential(*hidden, nn.Linear(6, 6))


def frozen_first():
    model = plain()
    model[:3].requires_grad_(False)
    return model


def with_batch_norm():
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(6, 6))


def trained(comm, strategy, model, sizes):
    strategy.setup(comm, seeded(model), sgd)
    for inputs, targets in some_batches(sizes):
        strategy.step(inputs, targets, len(targets))
    return strategy.full_state()


def train_batch_norm(comm, strategies_by_name):
    return {
        name: trained(comm, strategy, with_batch_norm, (6, 9))
        for name, strategy in strategies_by_name.items()
    }


def some_cut(*sizes):
    """GPipe's order, in which every second backward is cut in two."""
    for action in gpipe(*sizes):
        if action.kind == "backward" and action.micro_batch % 2:
            yield action._replace(kind="backward_input")
            action = action._replace(kind="backward_weight")
        yield action


def test_batch_norm_sees_the_whole_batch_or_each_micro_batch(monkeypatch):
    monkeypatch.setitem(PIPELINES, "own", Pipelining(some_cut, cuts_backward=True))
    alone = {n: strategies.get("single")(accumulate=n) for n in (1, 3)}
    alone = run(train_batch_norm, alone, world_size=1).values[0]
    assert largest_difference(alone[1], alone[3]) > 1e-3
    both = {
        (name, builtin): made(name, (1, 4), builtin) for name in TECHNIQUES for builtin in (0, 1)
    } | {(name, 0): made(name, (1, 4)) for name in OURS_ALONE}
    for states in run(train_batch_norm, both, world_size=3).values:
        for (name, builtin), state in states.items():
            due = alone[1 if name == "model_parallel" else 3]
            assert largest_difference(state, due) < 1e-10, (name, builtin)


class Detach(nn.Module):
    def forward(self, inputs):
        return inputs.detach()


class Learned(nn.Linear):
    """Outputs that do not depend on the inputs."""

    def forward(self, inputs):
        return super().forward(torch.ones_like(inputs))


def ended_by(layer):
    layers = [nn.Linear(6, 6), nn.Linear(6, 6), layer, nn.Linear(6, 6), nn.Tanh()]
    return nn.Sequential(*layers)


def detached():
    return ended_by(Detach())


def unused():
    return ended_by(Learned(6, 6))


class Doubled(nn.Module):
    def forward(self, inputs):
        return inputs.mul_(2)


def in_place():
    return nn.Sequential(Doubled(), nn.Linear(6, 6), Doubled(), nn.Tanh(), nn.Linear(6, 6))


def train_odd(comm, cases):
    return [trained(comm, strategy, model, (6, 9)) for strategy, model in cases]


@pytest.mark.parametrize("model", [detached, unused, in_place])
def test_layers_without_a_gradient_of_their_input_and_in_place_ones_are_as_on_one_device(model):
    cases = []
    for technique in ("model_parallel", "zero_bubble", "recompute"):
        # The odd layer is the last of a stage, all of one, and the first of one.
        cases += [(made(technique, points), model) for points in ((1, 3), (2, 3), (1, 2))]
    alone = [(strategies.get("single")(), model)]
    (due,) = run(train_odd, alone, world_size=1).values[0]
    for states in run(train_odd, cases, world_size=3).values:
        for case, state in zip(cases, states, strict=True):
            assert largest_difference(state, due) < 1e-10, case


class Masked(nn.Module):
    """A dropout by the random numbers of Python and NumPy; its rate is a buffer that falls."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rate", torch.tensor(0.5))

    def forward(self, inputs):
        if self.training and not inputs.is_meta:
            self.rate = self.rate * 0.9
            drawn = [random.random() * np.random.rand() > self.rate for _ in range(6)]
            return inputs * torch.tensor(drawn) * self.rate
        return inputs


def forgetful():
    """Layers whose forward depends on more than its input."""
    cells = [spectral_norm(nn.Linear(6, 6)), nn.Dropout(), Masked(), nn.BatchNorm1d(6)]
    return nn.Sequential(*cells, *copy.deepcopy(cells), nn.Linear(6, 6))


def with_and_without_recompute(comm):
    """By schedule the difference between the two, whether generators then go on alike, a rate."""
    found = {}
    for schedule in ("model_parallel", *PIPELINES):
        states, numbers = [], []
        for recompute in (False, True):
            seed_all(comm.rank)
            points = (1, 4, 7) if schedule == "interleaved" else (4,)
            if schedule == "model_parallel":
                strategy = strategies.get(schedule)(points, recompute=recompute)
            else:
                strategy = strategies.get("pipeline")(points, 3, schedule, recompute=recompute)
            states.append(trained(comm, strategy, forgetful, (6, 9)))
            numbers.append((random.random(), np.random.rand(), torch.rand(()).item()))
        found[schedule] = (
            largest_difference(*states),
            numbers[0] == numbers[1],
            states[1]["2.rate"].item(),
        )
    return found


def test_recomputing_draws_the_same_random_numbers_and_finds_the_same_buffers():
    for found in run(with_and_without_recompute, world_size=2).values:
        for schedule, compared in found.items():
            rate = 0.5 * 0.9 ** (2 if schedule == "model_parallel" else 6)
            assert compared == (0.0, True, pytest.approx(rate)), schedule


def spent(comm):
    """By technique and model, what one step of 7 samples is counted as."""
    found = {}
    for technique in (*TECHNIQUES, "zero_bubble", "interleaved"):
        for model, points in ((plain, (2, 5)), (frozen_first, (2, 3))):
            strategy = made(technique, points)
            if technique == "interleaved":
                points = (1, 2, 3, 4, 5)
                strategy = strategies.get("pipeline")(points, 4, "interleaved")
            strategy.setup(comm, seeded(model), sgd)
            before = comm.operations, comm.messages, comm.bytes_sent
            strategy.step(*some_batches((7,))[0], 7)
            after = comm.operations, comm.messages, comm.bytes_sent
            found[technique, model] = Cost(*(end - start for start, end in zip(before, after)))
    return found


def test_a_step_takes_the_operations_messages_and_bytes_of_the_formula():
    for rank, found in enumerate(run(spent, world_size=3).values):
        for (technique, model), cost in found.items():
            options = TECHNIQUES.get(technique) or OURS_ALONE.get(technique, {})
            if technique == "gpipe":
                options = options | {"schedule": "gpipe"}
            # All layers hand on 6 float64; with layers 0 to 2 frozen, the last stage alone trains,
            # and of six stages the last two.
            first = 2 if model.__name__ == "frozen_first" else 0
            if technique == "interleaved":
                options = {"micro_batches": 4, "schedule": technique, "stages_per_rank": 2}
                first *= 2
            due = model_parallel_cost([48] * 5, 7, rank, 3, first_trained=first, **options)
            assert cost == due, (technique, model, rank)


def kept_after_a_step(comm):
    strategy = made("gpipe", (2, 3))
    strategy.setup(comm, seeded(frozen_first), sgd)
    strategy.step(*some_batches((7,))[0], 7)
    return [len(stage.entering) + len(stage.leaving) for stage in strategy.stages]


def test_a_frozen_stage_keeps_no_activations():
    assert run(kept_after_a_step, world_size=3).values == [[0]] * 3


def held_bytes(comm):
    """By schedule, of 2 and of 6 micro-batches of 4 samples."""
    found = {}
    for schedule in ("gpipe", "1f1b", "zero_bubble", "recompute"):
        for count in (2, 6):
            how = ("gpipe" if schedule == "recompute" else schedule), schedule == "recompute"
            strategy = strategies.get("pipeline")((2, 4), count, how[0], recompute=how[1])
            trained(comm, strategy, plain, (4 * count,))
            found[schedule, count] = strategy.meter.peak_bytes
    return found


def test_fill_and_drain_holds_all_micro_batches_and_1f1b_no_more_than_stages_are_left():
    ranks = run(held_bytes, world_size=3).values
    for rank, found in enumerate(ranks):
        assert found["gpipe", 6] == 3 * found["gpipe", 2]
        # Stage s of 3 holds 3 - s micro-batches at most; of 2 there are no more.
        assert found["1f1b", 6] / found["1f1b", 2] == (1.5, 1, 1)[rank]
    # Stage 0 keeps its input (6 numbers a sample), and what Linear hands Tanh, which keeps it.
    assert ranks[0]["gpipe", 2] == 8 * 8 * (6 + 6)
    # Of the others it keeps the input alone, while one micro-batch runs again.
    assert ranks[0]["recompute", 6] == 4 * 8 * (6 * 6 + 6)
    # On stage 1, F0 F1 B0: two whole micro-batches, or of one what Linear needs for its weights:
    # its input and the gradient of its output.
    assert ranks[1]["zero_bubble", 6] == 3 * 4 * 8 * (6 + 6)


def test_the_halves_of_a_backward_leave_what_a_backward_leaves_and_free_the_rest():
    model = seeded(plain)
    inputs = some_batches((4,))[0][0].requires_grad_()
    graphs = LayerGraphs(inputs, lambda: HeldBytes(model))
    for layer in model:
        graphs.add(layer)
    # The input of each of four Linear and the outputs of three Tanh, which are the same: 4 in all.
    assert graphs.num_bytes == 4 * 4 * 6 * 8
    graphs.add(lambda outputs: outputs.square().sum())
    gradient = graphs.backward_input(None)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert graphs.num_bytes == 2 * 4 * 4 * 6 * 8, "inputs, and gradients of outputs"
    graphs.backward_weight()
    assert graphs.num_bytes == 0
    found = [gradient, *(parameter.grad for parameter in model.parameters())]
    due = torch.autograd.grad(model(inputs).square().sum(), [inputs, *model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(found, due, strict=True))


def test_a_hop_without_the_tensor_to_send_says_which_one_is_missing():
    hop = Hop(Message("gradient", 3, peer=0), None)
    with pytest.raises(ValueError, match="gradient of micro-batch 3"):
        run_hop(comm=None, hop=hop, outgoing=None, landing=None)
