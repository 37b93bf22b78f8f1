"""The asynchronous parameter server on PyTorch's RPC: every gradient is applied at once."""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from labkit.strategies.base import Batch, EpochEnd, OwnPaceStrategy
from labkit.strategies.builtin.rpc import ServedByRpc, call_server
from labkit.strategies.flat_parameters import flat_buffers, load_flat_buffers
from labkit.strategies.update import Update


class OwnPaceServer:
    """Applies every gradient as soon as it arrives: asynchronous.

    Args:
        values: [N], updated in place.
        optimizer: the optimizer of ``values``.
        buffers: [B], the model's buffers.
        shares: pushes per epoch.
        epochs: the number of epochs; later gradients are ignored.
        settings: of the ``Update``.

    Attributes:
        ends: for each epoch that has ended: when, the mean loss of its samples, the values and
            buffers at its end, and the part of its samples that was predicted right.
        updates: [worker, staleness] of every update.
    """

    def __init__(
        self,
        values: nn.Parameter,
        optimizer: torch.optim.Optimizer,
        buffers: Tensor,
        shares: int,
        epochs: int,
        **settings: Any,
    ):
        self.values, self.buffers = values, buffers
        self.update = Update(optimizer, [values], **settings)
        self.shares, self.epochs = shares, epochs
        self.ends: queue.SimpleQueue[tuple[float, Tensor, Tensor, Tensor, float]] = (
            queue.SimpleQueue()
        )
        self.updates: list[list[int]] = []
        self._lock = threading.Lock()
        self._done, self._samples, self._right = 0, 0, 0.0
        self._loss = torch.zeros((), dtype=torch.float64)

    def push_and_pull(
        self,
        worker: int,
        version: int,
        gradient: Tensor,
        loss: Tensor,
        samples: int,
        buffers: Tensor,
        scale: float | None = None,
        right: float = float("nan"),
    ) -> tuple[Tensor, Tensor, int, bool, dict[str, Any]]:
        """Apply a gradient, and return the latest parameters.

        Args:
            worker: which rank has computed the gradient.
            version: of the parameters that the worker used; the number of updates before them.
            gradient: [N], of the worker's share of a batch.
            loss: the sum of the losses of the share.
            samples: the size of the share.
            buffers: [B], of the worker's replica.
            scale: of the loss, which the worker used.
            right: how many samples of the share it predicted right; NaN if that is not counted.

        Returns:
            The latest values [N], buffers [B] and version, whether to continue, and the state of
            the scale of the loss.
        """
        with self._lock:
            if self._done < self.shares * self.epochs:
                self._done += 1
                self._loss += loss
                self._samples += samples
                self._right += right
                if samples:
                    self.values.grad, self.buffers = gradient, buffers
                    if self.update(scale):
                        self.updates.append([worker, len(self.updates) - version])
                if self._done % self.shares == 0:
                    self._end_epoch()
            go_on = self._done < self.shares * self.epochs
            # A copy: the next update must not change values that are still being sent.
            scaler = self.update.scaler.state_dict()
            return self.values.detach().clone(), self.buffers, len(self.updates), go_on, scaler

    def _end_epoch(self) -> None:
        values = self.values.detach().clone()
        loss, accuracy = self._loss / self._samples, self._right / self._samples
        self.ends.put((time.perf_counter(), loss, values, self.buffers, accuracy))
        self._samples, self._right = 0, 0.0
        self._loss.zero_()


# RPC calls a function by its name, so the function can find its server only as a global.
_server: OwnPaceServer


def _push_and_pull_now(*arguments: Any) -> tuple[Tensor, Tensor, int, bool, dict[str, Any]]:
    return _server.push_and_pull(*arguments)


class RpcAsyncParameterServer(ServedByRpc, OwnPaceStrategy):
    """``AsyncParameterServer`` on ``torch.distributed.rpc``: one remote call per gradient.

    Each call runs in its own thread, and a lock lets only one at a time change the parameters.
    Epochs, batch statistics and notes are those of ``AsyncParameterServer``; staleness has no
    bound here, and a worker that dies ends the run, since RPC can only be shut down by all ranks.
    """

    can_be_kept = False
    name = "async_parameter_server"

    def prepare(self) -> None:
        self.updates, self.lost = [], {}

    def train(self, batches: Iterator[Batch], steps: int, epochs: int) -> Iterator[EpochEnd]:
        if self.comm.rank == 0:
            yield from self.serve(steps * (self.comm.world_size - 1), epochs)
        else:
            self.comm.barrier()
            self.work(batches)

    def work(self, batches: Iterator[Batch]) -> None:
        """On a worker: compute a gradient, push and pull it, until the server says to stop."""
        version, go_on = 0, True
        while go_on:
            inputs, targets, batch_size = next(batches)
            self.gradient.zero_()
            loss = self.local.add(inputs, targets, divisor=batch_size)
            with self.comm.span("communicate"):
                buffers = flat_buffers(self.model).cpu()
                samples = len(targets)
                values, buffers, version, go_on, scaler = call_server(
                    *(_push_and_pull_now, self.comm.rank, version, self.gradient.cpu()),
                    *(loss.cpu(), samples, buffers, self.scaler.get_scale()),
                    float(self.right_of(samples)),
                )
                self._load(values, buffers)
                self.scaler.load_state_dict(scaler)

    def serve(self, shares: int, epochs: int) -> Iterator[EpochEnd]:
        """On the server: yield an ``EpochEnd`` per epoch, while RPC's threads serve."""
        global _server
        served = nn.Parameter(self.values.cpu().clone())
        buffers = flat_buffers(self.model).cpu()
        # As in ``AsyncParameterServer``, a push is a W-th of a step.
        settings = self.settings_of_update()
        settings["clip_norm"] = self.clip_norm and self.clip_norm / len(self.workers)
        self.optimizer = self.make_optimizer([served])
        plan = buffers, shares, epochs
        _server = OwnPaceServer(served, self.optimizer, *plan, **settings)
        self.comm.barrier()
        start_s = time.perf_counter()
        for _ in range(epochs):
            with self.comm.span("wait"):
                end_s, loss, values, buffers, self.accuracy = _server.ends.get()
            self._load(values, buffers)
            yield end_s - start_s, loss
        self.updates = _server.updates

    def _load(self, values: Tensor, buffers: Tensor) -> None:
        self.values.copy_(values)
        load_flat_buffers(self.model, buffers.to(self.comm.device))
