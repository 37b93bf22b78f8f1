"""Expert parallelism, on ours and on PyTorch's collectives: equal to one device; its bytes."""

import itertools
import math

import pytest
import torch
from odd_models import sgd
from ranks import travel_by_value
from test_equality import ours_or_theirs
from torch import nn
from torch.nn.functional import cross_entropy

from labkit import run, train_with
from labkit.costs.traffic import expert_parallel_cost
from labkit.strategies.tensor_parallel import check_cut
from labkit.training.result import checksum, largest_difference
from labkit.workload.experts import Experts, route
from labkit.workload.losses import CountedLoss, ShareLoss
from labkit.workload.transformer import gpt

travel_by_value(__name__)

# No number of ranks but one divides all of them. The second batch leaves ranks without a sample.
LENGTH, VOCABULARY, WIDTH, HEADS, BLOCKS, EXPERTS = 7, 11, 24, 4, 2, 5
BATCHES = (5, 1, 3, 4)
CLIP_NORM = 2.2


def small(per_token=2):
    torch.manual_seed(0)
    sizes = {"width": WIDTH, "num_heads": HEADS, "num_blocks": BLOCKS, "num_experts": EXPERTS}
    model = nn.Sequential(*gpt((LENGTH,), VOCABULARY, **sizes)).double()
    for parameter in model.parameters():
        # Biases and norms begin as zeros and ones, which would hide a wrong part.
        parameter.data += 0.1 * torch.randn_like(parameter)
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
        layer.router = nn.Linear(WIDTH, EXPERTS).double()
        layer.router.bias.data[3] = -100
    return model


def frozen():
    model = small()
    for part in (model[0], model[1], model[2].mlp.router, model[3]):
        part.requires_grad_(False)
    model[2].mlp.up.requires_grad_(False)
    return model


def some_texts(sizes=BATCHES):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (2, n, LENGTH), generator=generator) for n in sizes]


def trained(comm, make_strategy, make_model, clip_norm):
    """State, losses, predictions, counts; messages, bytes and choices of the first step."""
    strategy = make_strategy()
    strategy.clip_norm, strategy.loss = clip_norm, CountedLoss(ShareLoss.of(cross_entropy))
    strategy.setup(comm, make_model(), sgd)
    losses, sent = [], None
    for inputs, targets in some_texts():
        before = comm.messages, comm.bytes_sent
        mine = strategy.part_of(torch.arange(len(targets)))
        losses.append(strategy.step(inputs[mine], targets[mine], len(targets)).item())
        if sent is None:
            sent = comm.messages - before[0], comm.bytes_sent - before[1]
            rows = strategy.notes()["choices_by_rank"]
    logits = strategy.predict(strategy.part_of(some_texts()[0][0]))
    return (
        strategy.full_state(),
        losses,
        logits,
        [float(count) for count in strategy.loss.take()],
        (sent, rows),
    )


def in_turn(comm, cases):
    return [trained(comm, *case) for case in cases]


def plainly(make_model, clip_norm):
    """(state, losses, logits, right predictions, norms) of one device in plain PyTorch."""
    model, losses, norms, right = make_model(), [], [], 0
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = sgd(parameters)
    for inputs, targets in some_texts():
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = cross_entropy(outputs, targets)
        balance = sum(layer.balance_loss for layer in experts_of(model)) / len(targets)
        (loss + balance).backward()
        losses.append(loss.item() * len(targets))
        right += (outputs.argmax(dim=1) == targets).sum().item()
        norms.append(nn.utils.clip_grad_norm_(parameters, clip_norm or math.inf).item())
        optimizer.step()
    return model.state_dict(), losses, model(some_texts()[0][0]).detach(), right, norms


@pytest.mark.parametrize(
    "world_size", [2, 3, *(pytest.param(n, marks=pytest.mark.more) for n in (1, 4))]
)
def test_every_rank_ends_where_one_device_ends(world_size):
    norms = itertools.cycle((CLIP_NORM, None))
    cases = []
    for make_model in (small, one_each, one_idle, frozen):
        for builtin in (False, True):
            cases.append((ours_or_theirs("expert_parallel", builtin), make_model, next(norms)))
    values = run(in_turn, cases, world_size=world_size, device="cpu").values
    for case, by_rank in zip(cases, zip(*values, strict=True), strict=True):
        state, losses, logits, right, norms = plainly(*case[1:])
        assert len({checksum(own) for own, *_ in by_rank}) == 1, case
        assert largest_difference(by_rank[0][0], state) < 1e-10, case
        summed = [sum(one) for one in zip(*(own for _, own, *_ in by_rank))]
        assert summed == pytest.approx(losses, rel=1e-10), case
        ours = torch.cat([rank[2] for rank in by_rank])
        torch.testing.assert_close(ours, logits, rtol=1e-10, atol=1e-10)
        if case[2] is not None:
            assert max(norms) > CLIP_NORM, case
        counts = [sum(one) for one in zip(*(own for *_, own, _ in by_rank))]
        assert counts == [right, sum(BATCHES) * LENGTH], case


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_step_sends_the_bytes_of_the_formula(world_size):
    cases = [(ours_or_theirs("expert_parallel"), small, None)]
    (by_rank,) = zip(*run(in_turn, cases, world_size=world_size, device="cpu").values)
    rows = [rows for *_, (_, rows) in by_rank]
    assert sum(map(sum, rows)) == BLOCKS * 2 * BATCHES[0] * LENGTH
    model = small()
    all_elements = sum(p.numel() for p in model.parameters())
    of_experts = [[m.up, m.up_bias, m.down, m.down_bias] for m in experts_of(model)]
    replicated = all_elements - sum(p.numel() for layer in of_experts for p in layer)
    for rank, (*_, (sent, _)) in enumerate(by_rank):
        due = expert_parallel_cost(rows, BLOCKS, EXPERTS, WIDTH, replicated, 8, rank)
        assert sent == (due.messages, due.num_bytes), rank


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
