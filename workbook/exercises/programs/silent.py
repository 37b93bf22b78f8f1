"""Four jobs of page 15 that end without an error, and have learned something else than one device.

On which rank, in which layer and at which line each is at fault is in its data.
Symbols: P ranks, M micro-batches, B sequences or samples of one, T positions, D features.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.collectives import all_gather, ring_all_reduce
from labkit.engine.comm.comm import Comm
from labkit.strategies.tensor_cut import Conjugate
from labkit.workload.samples import share
from workbook.exercises.programs.jobs import Logged, average_gradients, logged

Data = tuple[Tensor, ...]


@contextlib.contextmanager
def unrecorded(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """In the place of ``labkit.recording``: record nothing."""
    yield


def tokens(
    comm: Comm, model: nn.Module, data: Data, steps: int, recording: Callable = unrecorded
) -> list[Logged]:
    """Fit ``model`` to this rank's sequences, which are padded to T positions.

    ``data``: inputs [P, M, B, T, D], targets [P, M, B, T, 1], tokens of each sequence [P, M, B].
    """
    inputs, targets, lengths = (part[comm.rank] for part in data)
    is_token = torch.arange(inputs.shape[2]) < lengths.unsqueeze(-1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log = []
    with recording(model, optimizer):
        for _ in range(steps):
            optimizer.zero_grad()
            losses = []
            for x, y, kept in zip(inputs, targets, is_token):
                errors = functional.mse_loss(model(x), y, reduction="none")
                losses.append(errors[kept].mean())
            loss = torch.stack(losses).mean()
            loss.backward()
            own = logged(loss, model)["gradient"]
            average_gradients(comm, model, comm.world_size)
            optimizer.step()
            log.append(logged(loss, model) | {"own": own})
    return log


class Blocks:
    """Blocks of a network, [B, D] -> [B, D], whose H inner features are divided over the ranks.

    Each takes x, the same on all ranks, and this rank's part of two weights [D, H] and [H, D].
    """

    def __init__(self, comm: Comm):
        self.comm = comm
        self.by_kind = {"tanh": self.tanh, "gate": self.gate, "softplus": self.softplus}
        self.by_kind |= {"sine": self.sine, "square": self.square}

    def total(self, x: Tensor) -> Tensor:
        return ring_all_reduce(self.comm, x.clone())

    def enter(self, x: Tensor) -> Tensor:
        return Conjugate.apply(x, torch.clone, self.total)

    def leave(self, x: Tensor) -> Tensor:
        return Conjugate.apply(x, self.total, torch.clone)

    def tanh(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        hidden = torch.tanh(self.enter(x) @ first)
        return self.leave(hidden @ second)

    def gate(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        gate = torch.sigmoid(self.enter(x).mean(1, keepdim=True))
        hidden = gate * torch.tanh(self.enter(x) @ first)
        return self.leave(hidden @ second)

    def softplus(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        hidden = functional.softplus(self.enter(x) @ first)
        mean = self.leave(hidden @ second / self.comm.world_size)
        return mean * self.comm.world_size

    def sine(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        hidden = torch.sin(x @ first)
        return self.leave(hidden @ second)

    def square(self, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        hidden = (self.enter(x) @ first).square()
        return Conjugate.apply(hidden @ second, self.total, self.total)


def blocks(comm: Comm, kinds: list[str], weights: dict[str, list[Tensor]], data: Data) -> Logged:
    """Loss and gradients of one step. ``weights``: by name, the part of each rank.

    ``embed.0`` and ``head.0`` are whole on each rank; block n has ``block n.0`` and ``block n.1``.
    """
    own = {name: parts[comm.rank].requires_grad_() for name, parts in weights.items()}
    network = Blocks(comm)
    x = data[0] @ own["embed.0"]
    for number, kind in enumerate(kinds):
        x = network.by_kind[kind](x, own[f"block {number}.0"], own[f"block {number}.1"])
    loss = functional.mse_loss(x @ own["head.0"], data[1])
    loss.backward()
    return {"loss": loss.item(), "gradients": {name: part.grad for name, part in own.items()}}


class Muon(torch.optim.Optimizer):
    """Muon for matrices whose rows lie end to end and are divided over the ranks.

    A rank keeps the momentum of its rows, updates them, and gets all others' from their ranks.
    """

    def __init__(self, comm: Comm, weights: Iterable[Tensor], lr: float, unshards: bool):
        super().__init__(weights, {"lr": lr})
        self.comm = comm
        self.unshards = unshards
        self.weights = self.param_groups[0]["params"]
        self.rows = rows_by_rank([len(weight) for weight in self.weights], comm.world_size)
        self.momentum = [torch.zeros_like(weight) for weight in self.weights]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        lr = self.param_groups[0]["lr"]
        for weight, momentum, rows in zip(self.weights, self.momentum, self.rows):
            own = rows[self.comm.rank]
            shard = momentum[own]
            shard.mul_(0.9).add_(weight.grad[own])
            if self.unshards:
                update = orthogonal(self.unshard(momentum, own))[own]
            else:
                update = orthogonal(shard)
            scale = max(1.0, shard.shape[0] / shard.shape[1]) ** 0.5
            weight[own] -= lr * scale * update
            weight.copy_(self.unshard(weight, own))

    def unshard(self, matrix: Tensor, own: slice) -> Tensor:
        """Return the matrix of the rows that each rank has of its own."""
        whole = torch.zeros_like(matrix)
        whole[own] = matrix[own]
        return ring_all_reduce(self.comm, whole)


def rows_by_rank(heights: list[int], world_size: int) -> list[list[slice]]:
    """For each matrix the rows of each rank, of which all have equally many in all."""
    per_rank = sum(heights) // world_size
    start = 0
    rows = []
    for height in heights:
        bounds = [min(max(r * per_rank - start, 0), height) for r in range(world_size + 1)]
        rows.append([slice(*pair) for pair in itertools.pairwise(bounds)])
        start += height
    return rows


def orthogonal(matrix: Tensor) -> Tensor:
    """Newton-Schulz: bring all singular values of ``matrix`` [R, D] near 1 (Jordan, 2024)."""
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.775 * gram + 2.0315 * gram @ gram) @ x
    return x


def muon(
    comm: Comm,
    weights: nn.ParameterDict,
    data: Data,
    unshards: bool,
    steps: int,
    recording: Callable = unrecorded,
) -> list[Logged]:
    """Fit ``weights`` [R, D] to this rank's share of inputs [B, D] and targets [B, sum of R]."""
    optimizer = Muon(comm, weights.values(), lr=0.05, unshards=unshards)
    x, y = (share(part, comm.rank, comm.world_size) for part in data)
    log = []
    with recording(weights, optimizer):
        for _ in range(steps):
            optimizer.zero_grad()
            outputs = torch.cat([x @ weight.T for weight in weights.values()], 1)
            loss = functional.mse_loss(torch.tanh(outputs), y)
            loss.backward()
            average_gradients(comm, weights, comm.world_size)
            optimizer.step()
            log.append(logged(loss, weights))
    return log


def last_bits(
    comm: Comm, model: nn.Module, data: Data, recipes: list[dict[str, Any]]
) -> list[Logged]:
    """Fit ``model`` to this rank's part of ``data``, [P, STEPS, B, D], by this rank's recipe."""
    recipe = recipes[comm.rank]
    log = []
    for x, y in zip(*(part[comm.rank] for part in data)):
        model.zero_grad()
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        for name, weight in model.named_parameters():
            total: Any = weight.grad
            if total.numel() < recipe["one_shot_below"]:
                # Small: one message to each rank in place of a way around the ring.
                parts = all_gather(comm, total)
                total = parts[comm.rank]
                for distance in range(1, comm.world_size):
                    total = total + parts[comm.rank - distance]
            else:
                ring_all_reduce(comm, total)
            mean = total / comm.world_size
            weight.grad = mean
            with torch.no_grad():
                if name in recipe["decayed"]:
                    weight.mul_(1 - recipe["decay"])
                weight.sub_(mean, alpha=recipe["lr"])
        log.append(logged(loss, model))
    return log
