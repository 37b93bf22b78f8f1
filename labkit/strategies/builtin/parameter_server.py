"""The parameter server on PyTorch's RPC: a worker calls a function on the server.

A call must not block until the other workers have called: it would occupy one of the server's few
RPC threads, and with more workers than threads none would be left to receive the last gradient. So
it returns a ``Future``, which frees its thread; the call with the last gradient makes the update
and completes the future for all.

Source: PyTorch, "Implementing batch RPC processing using asynchronous executions".
"""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from labkit.strategies.builtin.rpc import ServedByRpc, async_execution, call_server
from labkit.strategies.flat_parameters import average_buffers
from labkit.strategies.kept import KeptElements, State
from labkit.strategies.update import Update


class BatchServer:
    """Collects one gradient from each worker, then updates: synchronous.

    Args:
        values: [N], updated in place.
        optimizer: the optimizer of ``values``.
        workers: the number of workers, which is the number of gradients per update.
        settings: of the ``Update``.

    Attributes:
        updates: released once per update.
    """

    def __init__(
        self,
        values: nn.Parameter,
        optimizer: torch.optim.Optimizer,
        workers: int,
        **settings: Any,
    ):
        self.values, self.workers = values, workers
        self.update = Update(optimizer, [values], **settings)
        self.updates = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._pushed: dict[int, Tensor] = {}
        self._updated = torch.futures.Future()

    def push_and_pull(self, worker: int, gradient: Tensor) -> "torch.futures.Future[Tensor]":
        """Take a worker's gradient [N]; return a future of the values [N] after the update."""
        with self._lock:
            updated = self._updated
            self._pushed[worker] = gradient
            if len(self._pushed) < self.workers:
                return updated
            # In the order of the workers, not of their calls: a run can be repeated to the bit.
            first, *others = (self._pushed[worker] for worker in sorted(self._pushed))
            self.values.grad = sum(others, start=first)
            self.update()
            self._begin()
        # The values change only after every worker has pushed again, so no copy is needed.
        updated.set_result(self.values.detach())
        self.updates.release()
        return updated


class _KeptThere(KeptElements):
    """As ``KeptElements``, copied: the next update is made by a thread of RPC's."""

    def optimizer_state(self) -> State:
        found = super().optimizer_state()
        return {n: {k: v.clone() for k, v in state.items()} for n, state in found.items()}


# RPC calls a function by its name, so the function can find its server only as a global.
_server: BatchServer


@async_execution
def _push_and_pull(worker: int, gradient: Tensor) -> "torch.futures.Future[Tensor]":
    return _server.push_and_pull(worker, gradient)


def _scaler_state() -> dict[str, Any]:
    return _server.update.scaler.state_dict()


class RpcParameterServer(ServedByRpc):
    """``ParameterServer`` with one server, on ``torch.distributed.rpc``.

    The contract is the same: the result equals that of one device, batch statistics are those of
    each share (averaged over the workers, through ``Comm``), and the server works on no samples
    unless it is the only rank.

    Args:
        accumulate, amp, straggler: see ``LocalGradients``.
        sync_batch_norm: BatchNorm normalises with the statistics of the global batch, which the
            workers tell each other through ``Comm``: PyTorch's RPC has nothing for it.
    """

    name = "parameter_server"

    def __init__(
        self,
        accumulate: int = 1,
        amp: str | None = None,
        straggler: tuple[int, float] | None = None,
        sync_batch_norm: bool = False,
    ):
        super().__init__(accumulate, amp, straggler)
        self.sync_batch_norm = sync_batch_norm

    def prepare(self) -> None:
        global _server
        if self.comm.rank == 0:
            served = nn.Parameter(self.values.cpu())
            self.optimizer = self.make_optimizer([served])
            workers, settings = len(self.workers), self.settings_of_update()
            _server = BatchServer(served, self.optimizer, workers, **settings)

    @property
    def workers(self) -> range:
        return range(1, self.comm.world_size) or range(1)

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.gradient.zero_()
        sizes = self.common_sizes(batch_size)
        loss = self.local.add(inputs, targets, divisor=batch_size, sizes=sizes)
        if self.comm.rank in self.workers:
            with self.comm.span("communicate"):
                arguments = self.comm.rank, self.gradient.cpu()
                self.values.copy_(call_server(_push_and_pull, *arguments))
                if self.scaler.is_enabled():
                    # It changes only after every worker has pushed again.
                    self.scaler.load_state_dict(call_server(_scaler_state))
        else:
            # RPC's threads serve; this thread only waits for each update.
            with self.comm.span("wait"):
                _server.updates.acquire()
        return loss

    def kept(self) -> KeptElements:
        return _KeptThere(super().kept(), self.comm, [(0, self.values.numel())])

    def continued(self, own: Mapping[str, Tensor]) -> None:
        if self.comm.rank == 0:
            with torch.no_grad():
                _server.values.copy_(self.values)
        # RPC's threads would serve the first pushes before the server is as it was.
        self.comm.barrier()

    def end_epoch(self) -> None:
        average_buffers(self.comm, self.model, self.workers, self.sync_batch_norm)

    def full_state(self) -> dict[str, Tensor]:
        if self.comm.rank == 0:
            self.values.copy_(_server.values.detach())
        return super().full_state()
