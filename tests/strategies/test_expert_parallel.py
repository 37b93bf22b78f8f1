"""Expert parallelism, on ours and on PyTorch's collectives: equal to one device; its bytes."""

import pytest
import torch
from odd_models import seeded
from one_device import (
    BLOCKS,
    LENGTH,
    WIDTH,
    beside_one_device,
    ours_or_theirs,
    sgd,
    some_texts,
    transformer,
)
from ranks import travel_by_value
from torch import nn
from torch.nn.functional import cross_entropy

from labkit import run, train_with
from labkit.costs.traffic import expert_parallel_cost
from labkit.strategies.expert_parallel import ExpertParallel
from labkit.strategies.tensor_parallel import check_cut
from labkit.workload.experts import Experts, route
from labkit.workload.losses import ShareLoss

travel_by_value(__name__)

# The second batch leaves ranks without a sample.
SIZES = (5, 1, 3, 4)
EXPERTS = 5
CLIP_NORM = 2.2


def small(per_token=2):
    model = transformer(num_experts=EXPERTS)
    for layer in experts_of(model):
        layer.per_token = per_token
        # So large that a wrong one would show.
        layer.balance = 0.5
    return model


def experts_of(model):
    return [layer for layer in model.modules() if isinstance(layer, Experts)]


def one_each():
    return small(per_token=1)


def one_idle():
    """An expert that no token chooses."""
    model = small()
    for layer in experts_of(model):
        layer.router.weight.data[3] = -layer.router.weight.data.sum(0)
        layer.router = nn.Linear(WIDTH, EXPERTS)
        layer.router.bias.data[3] = -100
    return model


def frozen():
    model = small()
    for part in (model[0], model[1], model[2].mlp.router, model[3]):
        part.requires_grad_(False)
    model[2].mlp.up.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    "world_size", [2, 3, *(pytest.param(n, marks=pytest.mark.more) for n in (1, 4))]
)
def test_every_rank_ends_where_one_device_ends(world_size):
    ours, theirs = (ours_or_theirs("expert_parallel", builtin) for builtin in (False, True))
    cases = []
    for make_model in (small, one_each, one_idle, frozen):
        cases += [(ours, make_model, CLIP_NORM), (theirs, make_model, None)]
    found = beside_one_device(cases, some_texts(SIZES), some_texts(SIZES)[0][0], world_size)
    for case, (by_rank, alone) in zip(cases, found, strict=True):
        for rank in by_rank:
            torch.testing.assert_close(rank.logits, alone.logits, rtol=1e-10, atol=1e-10)
        if case[2] is not None:
            assert max(alone.norms) > CLIP_NORM, case


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_step_sends_the_bytes_of_the_formula(world_size):
    texts = some_texts(SIZES[:1])
    case = ours_or_theirs("expert_parallel"), small
    ((by_rank, _),) = beside_one_device([case], texts, texts[0][0], world_size)
    rows = [trained.notes["choices_by_rank"] for trained in by_rank]
    assert sum(map(sum, rows)) == BLOCKS * 2 * SIZES[0] * LENGTH
    model = small()
    all_elements = sum(p.numel() for p in model.parameters())
    of_experts = [[m.up, m.up_bias, m.down, m.down_bias] for m in experts_of(model)]
    replicated = all_elements - sum(p.numel() for layer in of_experts for p in layer)
    for rank, trained in enumerate(by_rank):
        due = expert_parallel_cost(rows, BLOCKS, EXPERTS, WIDTH, replicated, 8, rank)
        assert trained.sent == [(due.messages, due.num_bytes)], rank


def states_with_a_new_buffer(comm):
    """A move to a GPU makes new buffers in a model, and so may a forward."""
    strategy = ExpertParallel()
    model = seeded(small)
    model[3].register_buffer("count", torch.zeros(()))
    strategy.setup(comm, model, sgd)
    model[3].count = torch.ones(())
    saved = strategy.saved_state_class(strategy).collect()
    return strategy.full_state()["3.count"], saved["model/3.count"]


def test_a_state_has_the_buffers_that_the_model_has_now():
    assert run(states_with_a_new_buffer, world_size=1).values == [(1, 1)]


def test_a_capacity_drops_the_later_tokens_and_only_those():
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 4 + [[0.0, 2.0, 1.0]] * 2)
    routing = route(logits, per_token=1, capacity=1.0)
    assert routing.chosen.tolist() == [4, 2, 0]
    assert routing.counts.tolist() == [2, 2, 0]
    assert routing.tokens.tolist() == [0, 1, 4, 5]
    layer = Experts(3, 3, 1, capacity=1.0)
    layer.router.weight.data = torch.eye(3)
    outputs = layer(logits)
    assert outputs.abs().sum(dim=1).gt(0).tolist() == [True, True, False, False, True, True]
    assert layer.dropped == 2


def test_the_balance_loss_is_smallest_where_the_load_is_even():
    even, uneven = Experts(4, 4, 1, balance=0.1), Experts(4, 4, 1, balance=0.1)
    for layer, tokens in ((even, 8 * torch.eye(4)), (uneven, 8 * torch.eye(4)[[0, 0, 0, 1]])):
        layer.router.weight.data = torch.eye(4)
        layer(tokens.unsqueeze(0))
    assert even.balance_loss.item() == pytest.approx(0.1, rel=1e-6)
    assert uneven.balance_loss.item() > 0.2


def test_what_would_not_be_the_training_of_one_device_is_refused():
    text = {"dataset": "text", "model": "moe_gpt", "epochs": 1}
    both = {"world_size": 2, **text}
    refused = {
        "ddp does not know the choices of the whole batch": ("ddp", both),
        "pipeline does not know the choices": ("pipeline", {"world_size": 1, **text}),
        "balance loss.*accumulate 2": (
            "expert_parallel",
            dict(world_size=2, accumulate=2, **text),
        ),
        "has no labkit.workload.experts": ("expert_parallel", dict(world_size=2)),
        "8 experts cannot be divided over 9 ranks": (
            "expert_parallel",
            dict(world_size=9, **text),
        ),
        "tensor_parallel does not know the choices": ("tensor_parallel", both),
        "capacity 0": ("expert_parallel", {"capacity": 0.0, **both}),
    }
    for message, (strategy, settings) in refused.items():
        with pytest.raises(ValueError, match=message):
            train_with(strategy, **settings)
    with pytest.raises(ValueError, match="experts in their place"):
        check_cut(small(), ShareLoss.of(cross_entropy), 2)
