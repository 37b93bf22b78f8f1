"""Techniques whose workers run the model, each on its share of the batch.

The part of a step that needs no other rank, forward and backward, is here. It may run in
micro-batches (gradient accumulation: the activations of one micro-batch at a time, the gradients
of all of them), in mixed precision, and slowed down, as a straggler.

Each rank computes the gradient of (sum of its losses) / (samples in the global batch). The sum
over the ranks is then the gradient of the mean over the global batch, whatever the sizes of the
shares.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from labkit.collectives import broadcast
from labkit.engine import gpus
from labkit.engine.comm.comm import Comm
from labkit.strategies.base import MakeOptimizer, Strategy, trained_parameters
from labkit.strategies.sync_batch_norm import convert
from labkit.strategies.traits import Traits
from labkit.workload.experts import Experts
from labkit.workload.samples import share


@dataclass(eq=False)
class OnShares(Strategy):
    """The base of techniques that run the model on their share of a batch.

    A subclass may hold a part of the model (``Sharded``), or take the whole batch.

    A run equals that of one device if no layer combines samples and none draws random numbers:
    with dropout each rank draws its own, and BatchNorm normalizes each share by itself, unless
    ``sync_batch_norm`` gives it the global batch's statistics. At the end of an epoch all ranks
    get the first worker's running averages, as in PyTorch's DDP.

    Args:
        accumulate: micro-batches that a global batch is cut into, as evenly as possible, before
            each is divided.
        amp: ``bf16`` or ``fp16``: matrix products and convolutions in that dtype.
        straggler: (rank, factor), which some techniques take: that rank takes ``factor`` times as
            long to compute, except for its first micro-batch.
        sync_batch_norm: which some techniques take. A rank without samples runs the model on an
            empty batch, as others wait for its counts.

    Attributes:
        module, no_sync: what gradients are computed with, the model or what wraps it, and a
            context in which every micro-batch except the last one runs.
        runs_empty: whether ``module`` runs on empty micro-batches, for hooks that rely on it.
        loss_factor: a factor of the loss, where gradients are divided once more.
        ended_empty: whether this rank's last micro-batch had no samples, so that no backward ran.
        expert_layers: whose balance losses are added to the loss, but not to what is reported.
    """

    accumulate: int = 1
    amp: str | None = None
    module: Callable[..., Tensor] = field(init=False)
    no_sync: Callable[[], AbstractContextManager[object]] = field(default=nullcontext, init=False)
    expert_layers: Sequence[Experts] = field(default=(), init=False)
    runs_empty = False
    _is_warm = False
    loss_factor = 1

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.move_to_device(comm, model)
        self.optimizer = make_optimizer(self.trained)

    def move_to_device(self, comm: Comm, model: nn.Module) -> None:
        """Move the model to the device, and ``take`` it."""
        self.take(comm, model.to(comm.device))

    def take(self, comm: Comm, model: nn.Module) -> None:
        """Take the model, whose BatchNorm layers share their statistics if that is asked for."""
        self.comm = comm
        self.model = model.train()
        self.module = self.model
        self.trained = trained_parameters(model)
        self.expert_layers = [layer for layer in model.modules() if isinstance(layer, Experts)]
        if self.sync_batch_norm and comm.rank in self.workers and len(self.workers) > 1:
            convert(model, comm, self.workers)
            self.runs_empty = True

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.add_gradients(inputs, targets, batch_size)
        self.finish_backward()
        factor = self.gradient_factor(batch_size)
        self.update(factor)
        return loss

    def finish_backward(self) -> None:
        """Do what is left of the sums over ranks: all of it, or what backward has not done."""

    def part_of(self, batch: Tensor) -> Tensor:
        return torch.cat(self.micro_batches(batch))

    def micro_batches(self, batch: Tensor) -> list[Tensor]:
        """This rank's share of each micro-batch of a global batch [B]; the last may be empty."""
        count = max(1, min(self.accumulate, len(batch)))
        return [share(part, *self.share_index()) for part in batch.tensor_split(count)]

    def add_gradients(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        """Add the gradient of (sum of losses) / ``batch_size`` to the parameters' ``grad``.

        ``inputs`` [n, ...] and ``targets`` [n] are this rank's share, of a global batch of
        ``batch_size``; n may be 0. Returns the sum of the losses, a scalar, detached.
        """
        weight = self.loss_factor / batch_size
        sizes = [len(targets)]
        if self.accumulate > 1:
            sizes = [len(part) for part in self.micro_batches(torch.arange(batch_size))]
        total = targets.new_zeros((), dtype=torch.float64)
        micro_batches = zip(inputs.split(sizes), targets.split(sizes))
        for number, (inputs_part, targets_part) in enumerate(micro_batches, start=1):
            synchronization = self.no_sync if number < len(sizes) else nullcontext
            if len(targets_part) or self.runs_empty:
                with self.comm.span("compute"), synchronization():
                    loss = self._forward_backward(inputs_part, targets_part, weight)
                    total += loss.to(total.device)
        self.ended_empty = not sizes[-1]
        return total

    def _forward_backward(self, inputs: Tensor, targets: Tensor, weight: float) -> Tensor:
        slow, slowdown = self.straggler or (None, 1.0)
        is_slow = self.comm.rank == slow
        if is_slow:
            gpus.synchronize(self.comm.device)
        start_s = time.perf_counter()
        with self.precision.autocast(inputs.device):
            outputs = self.precision.wide(self.module(inputs))
        loss = self.loss(outputs, targets.to(outputs.device))
        balance_loss = sum(layer.balance_loss for layer in self.expert_layers)
        ((loss + balance_loss) * (self.precision.scaler.scale * weight)).backward()
        if is_slow:
            gpus.synchronize(self.comm.device)
            # PyTorch initializes itself in the first micro-batch, which takes many times as long.
            if self._is_warm:
                time.sleep((slowdown - 1) * (time.perf_counter() - start_s))
            self._is_warm = True
        return loss.detach()

    def end_epoch(self) -> None:
        for buffer in self.model.buffers():
            broadcast(self.comm, buffer, root=self.workers[0])


@dataclass(eq=False)
class Single(OnShares):
    """Plain training of the whole batch; ``sync_batch_norm`` changes nothing on one device."""

    sync_batch_norm: bool = False
    traits = Traits(balances_experts=True)

    def check_ranks(self, world_size: int) -> None:
        if world_size != 1:
            raise ValueError(
                f"strategy single trains on one rank, got world_size {world_size}: use world_size "
                "1, or another strategy"
            )
