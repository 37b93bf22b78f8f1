"""The broken jobs of page 15. On which rank, when and by how much each fails is in its data.

Symbols: P ranks, B samples of a batch, D inputs, T tokens.
"""

import itertools
import json
import time
import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DistributedSampler

from labkit.collectives import ring_all_reduce
from labkit.engine.comm.comm import Comm
from labkit.workload.samples import share

HARD, SPOILT, WIDTH = 2.0, 100.0, 512

# What a rank writes down of a step, by name.
Logged = dict[str, Any]


def mismatch(losses: Tensor, group: Any) -> None:
    """Average a gradient per step; ``losses`` [STEPS, B] are this rank's own. Plain PyTorch."""
    everyone = [torch.empty(losses.shape[1]) for _ in range(dist.get_world_size(group))]
    for own in losses:
        gradient = own - own.mean()
        if own.max() > HARD:
            dist.all_gather(everyone, own, group=group)  # the log shows batches with hard samples
        dist.all_reduce(gradient, group=group)


def drift(comm: Comm, model: nn.Module, inputs: Tensor, targets: Tensor) -> list[Logged]:
    """Fit ``model`` to this rank's part of ``inputs`` [P, STEPS, B, D]."""
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.02), []
    for x, y in zip(inputs[comm.rank], targets[comm.rank]):
        loss = functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(comm, model, comm.world_size)
        if loss < SPOILT:  # a batch with wrong targets must not spoil the model
            optimizer.step()
        log.append(logged(loss, model))
    return log


def straggler(comm: Comm, shards: list[list[str | Tensor]]) -> None:
    """Go through this rank's sequences [T, D], stored as tensors or as text."""
    rnn = nn.RNN(WIDTH, 32, num_layers=4)
    for stored in shards[comm.rank]:
        with comm.span("data"):
            sequence = torch.tensor(json.loads(stored)) if isinstance(stored, str) else stored
        with comm.span("compute"), torch.no_grad():
            state = rnn(sequence)[1]
        ring_all_reduce(comm, state)


def divisor(
    comm: Comm, model: nn.Module, inputs: Tensor, targets: Tensor, recipe: dict[str, int]
) -> list[Logged]:
    """Fit ``model`` to the ranks' shares of ``inputs`` [STEPS, B, D], in micro-batches."""
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.05), []
    for batch in zip(inputs, targets):
        mine = [share(part, comm.rank, comm.world_size) for part in batch]
        optimizer.zero_grad()
        losses = []
        for x, y in zip(*(part.split(recipe["size"]) for part in mine)):
            losses.append(functional.mse_loss(model(x), y))
            (losses[-1] / recipe["micro_batches"]).backward()
        own = logged(losses[0], model)["gradient"]
        average_gradients(comm, model, recipe["ranks"])
        optimizer.step()
        log.append(logged(torch.stack(losses).mean(), model) | {"own": own})
    return log


def sampler(comm: Comm, data: Any, seed: int, epochs: int, log_rank: int) -> list[list[int]]:
    """Return by epoch the numbers of the samples of ``data`` that this rank reads."""
    order, read = DistributedSampler(data, comm.world_size, comm.rank, seed=seed), []
    for epoch in range(epochs):
        if comm.rank == log_rank:
            print(f"epoch {epoch} begins")
            order.set_epoch(epoch)
        read.append(list(order))  # and here the model learns from them
    return read


def buffers(
    comm: Comm, model: nn.Module, inputs: Tensor, targets: Tensor, held_out: tuple[Tensor, Tensor]
) -> list[Logged]:
    """Fit a classifier to this rank's part of ``inputs`` [P, STEPS, B, D], and evaluate it."""
    optimizer, log = torch.optim.SGD(model.parameters(), lr=0.1), []
    for x, y in zip(inputs[comm.rank], targets[comm.rank]):
        loss = functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        average_gradients(comm, model, comm.world_size)
        optimizer.step()
        log.append(logged(loss, model))
    hits = model.eval()(held_out[0]).argmax(1) == held_out[1]
    return [*log, {"accuracy": hits.float().mean().item()}]


def link(comm: Comm, gradient: Tensor, steps: int) -> None:
    """Compute and add up a gradient in each step."""
    for _ in range(steps):
        with comm.span("compute"):
            gradient = gradient.sin()
        ring_all_reduce(comm, gradient)


def probe(comm: Comm, sizes: tuple[int, ...]) -> dict[tuple[int, int, int], float]:
    """Milliseconds of single messages on this rank, their receiver: {(from, to, bytes): ms}."""
    found, ranks = {}, range(comm.world_size)
    for src, dst, size in itertools.product(ranks, ranks, sizes):
        message = torch.zeros(size, dtype=torch.uint8)
        comm.barrier()
        start_s = time.perf_counter()
        if comm.rank == src != dst:
            comm.send(message, dst)
        elif comm.rank == dst != src:
            comm.recv(message, src)
            found[src, dst, size] = 1000 * (time.perf_counter() - start_s)
    return found


def average_gradients(comm: Comm, model: nn.Module, divide_by: int) -> None:
    """One all-reduce of all gradients, then the division."""
    gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
    total = ring_all_reduce(comm, parameters_to_vector(gradients))
    vector_to_parameters(total / divide_by, gradients)


def logged(loss: Tensor, model: nn.Module) -> Logged:
    """A step's log, with the CRC-32 of each parameter and buffer: equal bits, equal number."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    checksums = {}
    for name, tensor in model.state_dict().items():
        checksums[name] = zlib.crc32(tensor.numpy())
    return {
        "loss": loss.item(),
        "weights": parameters_to_vector(model.parameters()).detach(),
        "gradient": parameters_to_vector(gradients),
        "checksums": checksums,
    }
