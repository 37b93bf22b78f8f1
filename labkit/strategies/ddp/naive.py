"""DDP, naive: after backward has ended, the gradients are all-reduced one by one.

1. Every rank holds the whole model; rank 0's parameters and buffers are broadcast once. 2. Each
rank computes the gradients of its share of the batch. 3. ``sum_gradients``: each gradient becomes
the mean over the ranks. 4. Every rank makes the same update.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training"
(2020), section 3.2.1.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from labkit.collectives import (
    broadcast,
    fast_hierarchical_all_reduce,
    fast_ring_all_reduce,
)
from labkit.comm.comm import Comm
from labkit.strategies.flat_parameters import trained_parameters


class NaiveDDP(nn.Module):
    """A replica of ``module`` whose gradients are all-reduced when backward returns.

    It is used like the module itself. Call ``zero_grad`` after each update: otherwise the old
    gradients, which are summed already, are summed again.

    Buffers (BatchNorm's statistics) are rank 0's: they are broadcast before the first forward
    after an update. Each rank normalises with the statistics of its own share. PyTorch's DDP does
    both. A gradient that is missing on this rank counts as zeros. If it is missing on all ranks,
    it becomes zeros, and an optimizer with momentum still changes the parameter; on one device it
    would not. A parameter that is unfrozen later is not summed.

    Args:
        comm: this rank's Comm. Send nothing else on it until backward has returned.
        module: on ``comm.device``; values may differ between ranks, rank 0's are taken.
        op: ``mean`` over the ranks, as in PyTorch, or ``sum``, for a loss that is divided already.
        hierarchical: sum inside each host first, then between hosts.
    """

    def __init__(
        self, comm: Comm, module: nn.Module, *, op: str = "mean", hierarchical: bool = False
    ):
        super().__init__()
        self.comm, self.module, self.op = comm, module, op
        self.sum_over_ranks = (
            fast_hierarchical_all_reduce if hierarchical else fast_ring_all_reduce
        )
        self.trained = trained_parameters(module)
        self._synchronise, self._in_backward = True, False
        # Whether buffers may have changed since they were broadcast.
        self.buffers_behind = False
        for tensor in [*module.parameters(), *module.buffers()]:
            broadcast(comm, tensor)
        # The garbage collector does not see hooks, so it could not free what they refer to.
        this = weakref.ref(self)

        def hook(parameter: nn.Parameter) -> None:
            if replica := this():
                replica._on_gradient(parameter)

        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(hook)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self._begin()
        return self.module(*inputs, **keywords)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which backward only adds to this rank's gradients, without all-reduce.

        The first backward after the context all-reduces the accumulated gradients.
        """
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def without_samples(self) -> None:
        """Replace forward and backward on a rank without samples, while other ranks have some."""
        self._begin()
        if self._synchronise:
            self._end_backward()

    def _begin(self) -> None:
        # A backward that has raised; not one that is still running, as checkpointing does.
        if self._in_backward and torch._C._current_graph_task_id() < 0:
            self._in_backward = False
            self._wait_for_launched()
        self.broadcast_buffers()

    @torch.no_grad()
    def broadcast_buffers(self) -> None:
        """Give all ranks rank 0's buffers, if any buffer can have changed since the last call."""
        if not self.buffers_behind:
            return
        self.buffers_behind = False
        for dtype in dict.fromkeys(buffer.dtype for buffer in self.module.buffers()):
            buffers = [b for b in self.module.buffers() if b.dtype == dtype]
            flat = broadcast(self.comm, torch.cat([b.flatten() for b in buffers]))
            if self.comm.rank:
                for buffer, values in zip(buffers, flat.split([b.numel() for b in buffers])):
                    buffer.copy_(values.view_as(buffer))

    @torch.no_grad()
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if not self._synchronise:
            return
        if not self._in_backward:
            self._in_backward = True
            Variable._execution_engine.queue_callback(self._end_backward)
        self.gradient_ready(parameter)

    @torch.no_grad()
    def _end_backward(self) -> None:
        self._in_backward, self.buffers_behind = False, True
        self.sum_gradients()

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Called when backward has computed a gradient; this class waits until backward ends."""

    def _wait_for_launched(self) -> None:
        """Wait for the all-reduces that are under way; here there are none."""

    def sum_gradients(self) -> None:
        """All-reduce every gradient; called when backward has ended on this rank."""
        for parameter in self.trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            self.sum_over_ranks(self.comm, parameter.grad, self.op)
