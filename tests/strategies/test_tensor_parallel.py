"""Tensor parallelism, ours and PyTorch's: equal to one device; its bytes and memory."""

import itertools
from functools import partial

import pytest
import torch
from odd_models import seeded
from one_device import (
    BLOCKS,
    HEADS,
    LENGTH,
    WIDTH,
    beside_one_device,
    ours_or_theirs,
    some_texts,
    transformer,
)
from ranks import travel_by_value
from torch import nn
from torch.nn.functional import cross_entropy

from labkit import run
from labkit.costs.traffic import Cost, tensor_parallel_cost
from labkit.strategies.tensor_cut import CutLoss, TensorGroup
from labkit.workload.layers import HeldBytes
from labkit.workload.losses import ShareLoss

travel_by_value(__name__)

SIZES = (5, 3, 1, 4)
TEXTS = some_texts(SIZES)
# It clips some of the batches, see the test.
CLIP_NORM = 1.4


def frozen():
    model = transformer()
    for part in (model[1], model[2].mlp.up, model[2].norm1, model[3]):
        part.requires_grad_(False)
    # As a model of one's own may leave them out.
    for layer in (model[2].attention.qkv, model[2].attention.out, model[2].mlp.down):
        layer.bias = None
    return model


def frozen_first():
    """Nothing before the second block needs a gradient, and the head is tied to the embedding."""
    model = transformer()
    model[:2].requires_grad_(False)
    return model


def cases_on(world_size):
    norms = itertools.cycle((CLIP_NORM, None, CLIP_NORM))
    ours = partial(ours_or_theirs, "tensor_parallel")
    # Clipping would take one message more.
    yield ours(), transformer, None
    yield ours(sequence_parallel=True), transformer, None
    for make_model in (transformer, frozen, frozen_first):
        yield ours(), make_model, next(norms)
        yield ours(sequence_parallel=True, accumulate=3), make_model, next(norms)
    if HEADS % world_size == 0:
        yield ours(builtin=True), transformer, None
        yield ours(builtin=True, accumulate=2), frozen, CLIP_NORM


def all_end_where_one_device_ends(cases, world_size):
    """Check each case on so many ranks, ``dp`` of which have outputs; returns each rank's runs."""
    found = beside_one_device(cases, TEXTS, TEXTS[0][0], world_size)
    for (make_strategy, _, clip_norm), (by_rank, alone) in zip(cases, found, strict=True):
        outputs = [rank.logits for rank in by_rank if rank.logits is not None]
        assert len(outputs) == make_strategy.keywords.get("dp", 1)
        for logits in outputs:
            torch.testing.assert_close(logits, alone.logits, rtol=1e-10, atol=1e-10)
        if clip_norm is not None:
            assert min(alone.norms) < CLIP_NORM < max(alone.norms)
    return [by_rank for by_rank, _ in found]


@pytest.mark.parametrize(
    "world_size", [2, 3, *(pytest.param(n, marks=pytest.mark.more) for n in (1, 4))]
)
def test_every_rank_ends_where_one_device_ends_and_sends_the_bytes_of_the_formula(world_size):
    plain, sequence, *_ = all_end_where_one_device_ends([*cases_on(world_size)], world_size)
    model = seeded(transformer)
    kept = [model[0].position, model[3]]
    for block in model[1:3]:
        kept += [block.norm1, block.norm2]
    replicated = sum(p.numel() for part in kept for p in part.parameters()) + 2 * BLOCKS * WIDTH
    for is_sequence, by_rank in ((False, plain), (True, sequence)):
        for rank, trained in enumerate(by_rank):
            where = replicated, 8, world_size, rank
            options = {"sequence_parallel": is_sequence}
            due = tensor_parallel_cost((SIZES[0], LENGTH, WIDTH), BLOCKS, *where, **options)
            assert trained.sent[0] == (due.messages, due.num_bytes), (rank, is_sequence)


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
    # Of equal logits the first class is predicted, and a target may be ignored.
    logits[1:3] = 0
    targets[1] = 0
    targets[2] = 1
    targets.view(-1)[-1] = -100
    whole = logits.clone().requires_grad_()
    due = cross_entropy(whole, targets, reduction="sum") * len(targets) / targets.numel()
    due.backward()
    values = run(losses_of, logits, targets, world_size=3, device="cpu").values
    assert [loss for loss, *_ in values] == pytest.approx([due.item()] * 3)
    torch.testing.assert_close(torch.cat([grad for *_, grad in values], dim=1), whole.grad)
    right = (logits.argmax(dim=1) == targets).sum().item()
    counts = [(int(ours), judged) for _, (ours, judged), _ in values]
    assert counts == [(right, targets.numel() - 1), (0, 0), (0, 0)]


def held_by(comm, sequence_parallel):
    """Bytes of this rank's parameters, and of what a forward keeps for its backward."""
    group, model = TensorGroup(comm, sequence_parallel), seeded(transformer)
    group.cut(model)
    with HeldBytes(model) as held:
        outputs = model(TEXTS[0][0])
    assert outputs.shape[1] in (3, 4)
    return sum(p.nbytes for p in model.parameters()), held.num_bytes


def test_a_rank_holds_a_part_of_the_parameters_and_activations():
    whole = sum(p.nbytes for p in seeded(transformer).parameters())
    plain, sequence = (
        run(held_by, one, world_size=3, device="cpu").values for one in (False, True)
    )
    for (size, held), (same_size, less) in zip(plain, sequence, strict=True):
        assert size == same_size < whole / 2
        assert less < held
    # Each part of a parameter is on one rank.
    everywhere = run(replicated_bytes, world_size=3, device="cpu").values[0]
    assert sum(size for size, _ in plain) == whole + 2 * everywhere
    assert everywhere < whole / 10


def replicated_bytes(comm):
    group, model = TensorGroup(comm), seeded(transformer)
    group.cut(model)
    return sum(p.nbytes for p in model.parameters() if p not in group.cuts)


def test_positions_and_losses_that_cannot_be_cut_are_refused():
    strategy = ours_or_theirs("tensor_parallel", sequence_parallel=True)()
    for ranks, what in ((8, "7 positions"), (12, "11 entries of the vocabulary")):
        with pytest.raises(ValueError, match=f"{what} cannot be cut over {ranks} ranks"):
            strategy.check_model(transformer(heads=12), ShareLoss.of(cross_entropy), ranks)
    with pytest.raises(ValueError, match="use loss cross_entropy"):
        strategy.check_model(transformer(), ShareLoss.of(nn.functional.mse_loss), 2)
