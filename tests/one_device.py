"""A model trained by a technique on real ranks, and by plain PyTorch on one device."""

import itertools
import math
from functools import partial
from typing import NamedTuple

import pytest
import torch
from odd_models import seeded
from ranks import travel_by_value
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labkit import run
from labkit.strategies.async_parameter_server import AsyncParameterServer
from labkit.training.resolve import find_technique
from labkit.training.result import checksum, largest_difference
from labkit.workload.experts import Experts
from labkit.workload.losses import CountedLoss, ShareLoss
from labkit.workload.transformer import gpt

travel_by_value(__name__)

# Of the transformer below. No number of ranks but one divides all of them.
LENGTH, VOCABULARY, WIDTH, HEADS, BLOCKS = 7, 11, 24, 4, 2


class Trained(NamedTuple):
    """The end of a training on a rank, or on one device.

    By step ``losses``, summed over samples, and ``sent``, messages and bytes, or ``norms`` of the
    gradient on one device; then ``logits`` of a batch, and ``counts``: right predictions, targets.
    """

    state: dict[str, Tensor]
    losses: list[float]
    logits: Tensor | None
    counts: list[float]
    sent: list[tuple[int, int]]
    norms: list[float]
    notes: dict


def ours_or_theirs(name, builtin=False, **options):
    return partial(find_technique(name, builtin=builtin), **options)


def sgd(parameters):
    """With weight decay a parameter without a gradient changes, too."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def train(comm, batches, judged, make_strategy, make_model, clip_norm=None, make_optimizer=sgd):
    """Train on this rank's part of ``batches``; an asynchronous technique has no losses."""
    strategy = make_strategy()
    strategy.clip_norm = clip_norm
    strategy.loss = CountedLoss(ShareLoss.of(cross_entropy))
    strategy.setup(comm, seeded(make_model), make_optimizer)
    shares = []
    for inputs, targets in batches:
        own = strategy.part_of(torch.arange(len(targets)))
        shares.append((inputs[own], targets[own], len(targets)))
    losses = []
    sent = []
    if isinstance(strategy, AsyncParameterServer):
        list(strategy.train(itertools.cycle(shares), len(batches), 1))
    else:
        for share in shares:
            before = comm.messages, comm.bytes_sent
            losses.append(strategy.step(*share).item())
            sent.append((comm.messages - before[0], comm.bytes_sent - before[1]))
    strategy.end_epoch()
    state = strategy.full_state()
    logits = strategy.predict(judged)
    counts = [float(count) for count in strategy.loss.take()]
    strategy.close()
    return Trained(state, losses, logits, counts, sent, [], strategy.notes())


def train_each(comm, batches, judged, cases):
    return [train(comm, batches, judged, *case) for case in cases]


def plainly(batches, judged, make_model, clip_norm=None, make_optimizer=sgd):
    """Train on one device in plain PyTorch."""
    model = seeded(make_model)
    losses = []
    norms = []
    right = 0
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make_optimizer(trained)
    experts = [layer for layer in model.modules() if isinstance(layer, Experts)]
    for inputs, targets in batches:
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = cross_entropy(outputs, targets)
        balance = sum(layer.balance_loss for layer in experts) / len(targets)
        (loss + balance).backward()
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        losses.append(loss.item() * len(targets))
        right += (outputs.argmax(dim=1) == targets).sum().item()
        norms.append(nn.utils.clip_grad_norm_(trained, clip_norm or math.inf).item())
        optimizer.step()
    counts = [right, sum(targets.numel() for _, targets in batches)]
    return Trained(model.state_dict(), losses, model(judged).detach(), counts, [], norms, {})


def beside_one_device(cases, batches, judged, world_size):
    """Train each case on so many ranks and on one device, compare, and return both.

    A case is (make_strategy, make_model, clip_norm, make_optimizer); the last two may be left out.
    """
    # Many trainings: on a busy machine they may take minutes.
    options = {"world_size": world_size, "device": "cpu", "timeout_s": 900}
    values = run(train_each, batches, judged, cases, **options).values
    found = []
    for case, by_rank in zip(cases, zip(*values, strict=True), strict=True):
        make_strategy, *how = case
        alone = plainly(batches, judged, *how)
        is_rounded = any(value.dtype == torch.float32 for value in alone.state.values())
        furthest = 1e-6 if is_rounded else 1e-10
        assert len({checksum(rank.state) for rank in by_rank}) == 1, case
        assert largest_difference(by_rank[0].state, alone.state) < furthest, case
        if by_rank[0].losses:
            summed = [sum(losses) for losses in zip(*(rank.losses for rank in by_rank))]
            assert summed == pytest.approx(alone.losses, rel=furthest), case
        if by_rank[0].losses and make_strategy.func.traits.through_comm:
            counts = [sum(counts) for counts in zip(*(rank.counts for rank in by_rank))]
            assert counts == alone.counts, case
        found.append((by_rank, alone))
    return found


def transformer(heads=HEADS, num_experts=0):
    """A small GPT; its biases and norms are no zeros and ones, which would hide a wrong part."""
    sizes = {"width": WIDTH, "num_heads": heads, "num_blocks": BLOCKS}
    if num_experts:
        sizes["num_experts"] = num_experts
    model = nn.Sequential(*gpt((LENGTH,), VOCABULARY, **sizes))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def some_texts(sizes):
    """Inputs and targets [n, LENGTH] for each n."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (2, n, LENGTH), generator=generator) for n in sizes]
