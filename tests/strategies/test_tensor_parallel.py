"""Tensor parallelism, ours and PyTorch's: equal to one device; its bytes and memory."""

import itertools
import math
from functools import partial

import pytest
import torch
from odd_models import sgd
from ranks import travel_by_value
from test_equality import ours_or_theirs
from torch import nn
from torch.nn.functional import cross_entropy

from labkit import run
from labkit.costs.traffic import Cost, tensor_parallel_cost
from labkit.strategies.tensor_cut import CutLoss, TensorGroup
from labkit.training.result import checksum, largest_difference
from labkit.workload.layers import HeldBytes
from labkit.workload.losses import CountedLoss, ShareLoss
from labkit.workload.transformer import gpt

travel_by_value(__name__)

# No number of ranks but one divides all of them.
LENGTH, VOCABULARY, WIDTH, HEADS, BLOCKS = 7, 11, 24, 4, 2
BATCHES = (5, 3, 1, 4)
# It clips some of the batches, see the test.
CLIP_NORM = 1.4


def small(heads=HEADS):
    torch.manual_seed(0)
    sizes = {"width": WIDTH, "num_heads": heads, "num_blocks": BLOCKS}
    model = nn.Sequential(*gpt((LENGTH,), VOCABULARY, **sizes)).double()
    for parameter in model.parameters():
        # Biases and norms begin as zeros and ones, which would hide a wrong part.
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def frozen():
    model = small()
    for part in (model[1], model[2].mlp.up, model[2].norm1, model[3]):
        part.requires_grad_(False)
    return model


def frozen_first():
    """Nothing before the second block needs a gradient, and the head is tied to the embedding."""
    model = small()
    model[:2].requires_grad_(False)
    return model


def some_texts(sizes=BATCHES):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (2, n, LENGTH), generator=generator) for n in sizes]


def trained(comm, make_strategy, make_model, clip_norm):
    """State, losses, predictions, counts; messages and bytes of the first step."""
    strategy = make_strategy()
    strategy.clip_norm, strategy.loss = clip_norm, CountedLoss(ShareLoss.of(cross_entropy))
    strategy.setup(comm, make_model(), sgd)
    losses, sent = [], []
    for inputs, targets in some_texts():
        before = comm.messages, comm.bytes_sent
        mine = strategy.part_of(torch.arange(len(targets)))
        losses.append(strategy.step(inputs[mine], targets[mine], len(targets)).item())
        sent.append((comm.messages - before[0], comm.bytes_sent - before[1]))
    logits = strategy.predict(some_texts()[0][0])
    return (
        strategy.full_state(),
        losses,
        logits,
        [float(count) for count in strategy.loss.take()],
        sent[0],
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
        loss.backward()
        losses.append(loss.item() * len(targets))
        right += (outputs.argmax(dim=1) == targets).sum().item()
        norms.append(nn.utils.clip_grad_norm_(parameters, clip_norm or math.inf).item())
        optimizer.step()
    return model.state_dict(), losses, model(some_texts()[0][0]).detach(), right, norms


def cases_on(world_size):
    norms = itertools.cycle((CLIP_NORM, None, CLIP_NORM))
    ours = partial(ours_or_theirs, "tensor_parallel")
    for make_model in (small, frozen, frozen_first):
        yield ours(), make_model, next(norms)
        yield ours(sequence_parallel=True, accumulate=3), make_model, next(norms)
    if HEADS % world_size == 0:
        yield ours(builtin=True), small, None
        yield ours(builtin=True, accumulate=2), frozen, CLIP_NORM


def all_end_where_one_device_ends(cases, world_size):
    """Check each case on so many ranks; ``dp`` of them have outputs."""
    values = run(in_turn, cases, world_size=world_size, device="cpu").values
    for case, by_rank in zip(cases, zip(*values, strict=True), strict=True):
        make_strategy, *how = case
        state, losses, logits, right, norms = plainly(*how)
        # What all ranks have is in the state of each.
        assert len({checksum(own) for own, *_ in by_rank}) == 1, case
        assert largest_difference(by_rank[0][0], state) < 1e-10, case
        summed = [sum(one) for one in zip(*(own for _, own, *_ in by_rank))]
        assert summed == pytest.approx(losses, rel=1e-10), case
        outputs = [rank[2] for rank in by_rank if rank[2] is not None]
        assert len(outputs) == make_strategy.keywords.get("dp", 1), case
        for one in outputs:
            torch.testing.assert_close(one, logits, rtol=1e-10, atol=1e-10)
        if how[1] is not None:
            assert min(norms) < CLIP_NORM < max(norms), case
        if make_strategy.func.traits.through_comm:
            counts = [sum(one) for one in zip(*(own for *_, own, _ in by_rank))]
            assert counts == [right, sum(BATCHES) * LENGTH], case


@pytest.mark.parametrize(
    "world_size", [2, 3, *(pytest.param(n, marks=pytest.mark.more) for n in (1, 4))]
)
def test_every_rank_ends_where_one_device_ends(world_size):
    all_end_where_one_device_ends(list(cases_on(world_size)), world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_step_sends_the_bytes_of_the_formula(world_size):
    cases = [
        (ours_or_theirs("tensor_parallel", sequence_parallel=one), small, None)
        for one in (False, True)
    ]
    values = run(in_turn, cases, world_size=world_size, device="cpu").values
    model = small()
    kept = [
        model[0].position,
        model[3],
        *(norm for b in model[1:3] for norm in (b.norm1, b.norm2)),
    ]
    replicated = sum(p.numel() for part in kept for p in part.parameters()) + 2 * BLOCKS * WIDTH
    for rank, both in enumerate(values):
        for is_sequence, (*_, sent) in zip((False, True), both, strict=True):
            where = replicated, 8, world_size, rank
            options = {"sequence_parallel": is_sequence}
            due = tensor_parallel_cost((BATCHES[0], LENGTH, WIDTH), BLOCKS, *where, **options)
            assert sent == (due.messages, due.num_bytes), (rank, is_sequence)


def test_a_block_sends_four_all_reduces_of_its_activations():
    # n T D = 32 x 64 x 96, of which 4 ranks send 2 x 3 / 4 each time.
    of_block = 4 * 2 * 3 * 32 * 64 * 96 * 4 // 4
    costs = [tensor_parallel_cost((32, 64, 96), blocks, 100, 4, 4) for blocks in (4, 5)]
    assert costs[1] == costs[0] + Cost(24, 24, of_block)


def losses_of(comm, logits, targets):
    """This rank's losses of a cut vocabulary, right ones, and the gradient of its own logits."""
    loss = CutLoss(comm, logits.shape[1])
    sizes = TensorGroup(comm).sizes(logits.shape[1])
    own = logits.split(sizes, dim=1)[comm.rank].clone().requires_grad_()
    total = loss(own, targets)
    total.backward()
    return total.item(), loss.take(), own.grad


@pytest.mark.parametrize("shape", [(6, 11), (3, 5, 4)])
def test_the_loss_of_a_cut_vocabulary_equals_that_of_a_whole_one(shape):
    generator = torch.Generator().manual_seed(2)
    # The exponential of such a logit is infinite.
    logits = torch.randn(*shape, generator=generator, dtype=torch.float64) * 1000
    targets = torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)
    targets[0] = logits[0].argmax(dim=0)
    whole = logits.clone().requires_grad_()
    due = cross_entropy(whole, targets) * len(targets)
    due.backward()
    values = run(losses_of, logits, targets, world_size=3, device="cpu").values
    assert [loss for loss, *_ in values] == pytest.approx([due.item()] * 3)
    torch.testing.assert_close(torch.cat([grad for *_, grad in values], dim=1), whole.grad)
    right = (logits.argmax(dim=1) == targets).sum().item()
    counts = [(int(ours), judged) for _, (ours, judged), _ in values]
    assert counts == [(right, targets.numel()), (0, 0), (0, 0)]


def held_by(comm, sequence_parallel):
    """Bytes of this rank's parameters, and of what a forward keeps for its backward."""
    group, model = TensorGroup(comm, sequence_parallel), small()
    group.cut(model)
    with HeldBytes(model) as held:
        outputs = model(some_texts()[0][0])
    assert outputs.shape[1] in (3, 4)
    return sum(p.nbytes for p in model.parameters()), held.num_bytes


def test_a_rank_holds_a_part_of_the_parameters_and_activations():
    whole = sum(p.nbytes for p in small().parameters())
    plain, sequence = (
        run(held_by, one, world_size=3, device="cpu").values for one in (False, True)
    )
    for (size, held), (same_size, less) in zip(plain, sequence, strict=True):
        assert size == same_size < whole / 2
        assert less < held
    # Each part of a parameter is on one rank.
    model = small()
    everywhere = run(replicated_bytes, world_size=3, device="cpu").values[0]
    assert sum(size for size, _ in plain) == whole + 2 * everywhere
    assert everywhere < sum(p.nbytes for p in model.parameters()) / 10


def replicated_bytes(comm):
    group, model = TensorGroup(comm), small()
    group.cut(model)
    return sum(p.nbytes for p in model.parameters() if p not in group.cuts)


def test_positions_and_losses_that_cannot_be_cut_are_refused():
    strategy = ours_or_theirs("tensor_parallel", sequence_parallel=True)()
    for ranks, what in ((8, "7 positions"), (12, "11 entries of the vocabulary")):
        with pytest.raises(ValueError, match=f"{what} cannot be cut over {ranks} ranks"):
            strategy.check_model(small(heads=12), ShareLoss.of(cross_entropy), ranks)
    with pytest.raises(ValueError, match="use loss cross_entropy"):
        strategy.check_model(small(), ShareLoss.of(nn.functional.mse_loss), 2)
