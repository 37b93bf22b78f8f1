"""Parameter servers on PyTorch's RPC, next to the ranks' process group.

A rank calls a function on another and waits for its result; RPC's own threads run it. Here rank 0
is the server, and one remote call is push and pull at once: its argument is the worker's gradient,
its result the new values. RPC's bytes bypass ``Comm``, so they are not counted; they pass through
host memory. Functions and arguments are sent as pickles, and RPC does not check who sends them:
see SECURITY.md.

A call must not block until the other workers have called: it would occupy one of the server's few
RPC threads, and with more workers than threads none would be left to receive the last gradient. So
the synchronous server returns a ``Future``, which frees its thread; the call with the last
gradient makes the update and completes the future for all.

Source: PyTorch, "Implementing batch RPC processing using asynchronous executions".
"""

import contextlib
import os
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from labkit.comm.comm import Comm
from labkit.errors import PeerLostError
from labkit.strategies.base import Batch, EpochEnd, MakeOptimizer, OnShares, OwnPaceStrategy
from labkit.strategies.flat_parameters import (
    average_buffers,
    flat_buffers,
    lay_end_to_end,
    load_flat_buffers,
)
from labkit.strategies.local_gradients import check_straggler
from labkit.strategies.state import (
    State,
    cut,
    joined,
    load_state_of_parameter,
    only_trained,
    state_of_parameter,
)
from labkit.strategies.update import Update

# Waiting for a straggler is not an error, and the run has its own deadline.
_PATIENCE_S = 24 * 3600.0
# If this variable is 1, everyone on this machine may run code as this user.
TRUST = "LABKIT_TRUST_LOCAL_USERS"
# By login.defs(5) the user ids of people begin here; ids from a directory service are far higher.
_FIRST_PERSON = 1000
# The ids of systemd's dynamic users, which are services.
_SERVICES = range(61_184, 65_520)


class BatchServer:
    """Synchronous: collects one gradient [N] from each of the ``workers``, then updates.

    ``updates`` is released once per update of the values [N].
    """

    def __init__(self, values: nn.Parameter, update: Update, workers: int):
        self.values, self.update, self.workers = values, update, workers
        self.updates, self._lock = threading.Semaphore(0), threading.Lock()
        self._pushed: dict[int, Tensor] = {}
        self._updated = torch.futures.Future()

    def push_and_pull(self, worker: int, gradient: Tensor) -> "torch.futures.Future[Any]":
        """Take a gradient; return a future of the next values, and of the state of the scale."""
        with self._lock:
            updated = self._updated
            self._pushed[worker] = gradient
            if len(self._pushed) < self.workers:
                return updated
            # In the order of the workers, not of their calls: a run can be repeated to the bit.
            first, *others = (self._pushed[worker] for worker in sorted(self._pushed))
            self.values.grad = sum(others, start=first)
            self.update()
            self._pushed, self._updated = {}, torch.futures.Future()
        # The values change only after every worker has pushed again, so no copy is needed.
        updated.set_result((self.values.detach(), self.update.scaler.state_dict()))
        self.updates.release()
        return updated


class OwnPaceServer:
    """Asynchronous: applies every gradient as soon as it arrives.

    ``shares`` are pushes per epoch; those after the last epoch are ignored. ``ends`` has for each
    epoch that has ended: when, the mean loss of its samples, the values [N] and buffers [B] at its
    end, and the part of its samples that was predicted right.
    """

    def __init__(
        self, values: nn.Parameter, update: Update, buffers: Tensor, shares: int, epochs: int
    ):
        self.values, self.update, self.buffers = values, update, buffers
        self.shares, self.epochs = shares, epochs
        self.ends: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.updates: list[list[int]] = []
        self._lock, self._done = threading.Lock(), 0
        # Of this epoch: the sum of losses, right predictions, samples.
        self._sums = torch.zeros(3, dtype=torch.float64)

    def push_and_pull(
        self,
        worker: int,
        version: int,
        gradient: Tensor,
        buffers: Tensor,
        scale: float | None,
        sums: Sequence[float],
    ) -> tuple[Tensor, Tensor, int, bool, dict[str, Any]]:
        """Apply a gradient [N], computed with the parameters after ``version`` updates.

        ``sums`` are of its share: loss, right predictions (NaN if not counted), samples. Returns
        the latest values, buffers and version, whether to continue, and the state of the scale.
        """
        with self._lock:
            if self._done < self.shares * self.epochs:
                self._done += 1
                self._sums += torch.tensor(sums, dtype=torch.float64)
                if sums[2]:
                    self.values.grad, self.buffers = gradient, buffers
                    if self.update(scale):
                        self.updates.append([worker, len(self.updates) - version])
                if self._done % self.shares == 0:
                    loss, right, _ = self._sums / self._sums[2]
                    values = self.values.detach().clone()
                    self.ends.put((time.perf_counter(), loss, values, self.buffers, right))
                    self._sums = torch.zeros_like(self._sums)
            goes_on = self._done < self.shares * self.epochs
            # A copy: the next update must not change values that are still being sent.
            scaler = self.update.scaler.state_dict()
            return self.values.detach().clone(), self.buffers, len(self.updates), goes_on, scaler


# RPC calls a function by its name, so the function can find its server only as a global.
_server: Any = None


def _push_and_pull(*arguments: Any) -> Any:
    return _server.push_and_pull(*arguments)


_push_and_wait = _push_and_pull
if rpc.is_available():

    @rpc.functions.async_execution
    def _push_and_wait(*arguments: Any) -> Any:
        return _server.push_and_pull(*arguments)


class ServedByRpc(OnShares):
    """A technique whose workers push and pull by remote calls to rank 0."""

    optimizes = "elements"
    through_comm = False
    name: str

    def __init__(
        self,
        accumulate: int = 1,
        amp: str | None = None,
        straggler: tuple[int, float] | None = None,
        sync_batch_norm: bool = False,
    ):
        check_available(self.name)
        check_straggler(straggler)
        super().__init__(accumulate, amp, straggler, sync_batch_norm)

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.check_ranks(comm.world_size)
        self.place(comm, model)
        self.compute_with(self.model)
        self.values, self.gradient = lay_end_to_end(self.model)
        if comm.rank == 0:
            # On the host, where RPC's threads update them.
            self.served = nn.Parameter(self.values.cpu().clone())
            self.optimizer = make_optimizer([self.served])
        self.prepare()
        join_rpc(comm)

    def prepare(self) -> None:
        """Make what has to exist before the first remote call."""
        raise NotImplementedError

    def close(self) -> None:
        """Wait until no rank makes calls any more, then end RPC on all ranks."""
        rpc.shutdown()


class RpcParameterServer(ServedByRpc):
    """``ParameterServer`` with one server, on ``torch.distributed.rpc``.

    The contract is the same: the result equals that of one device, batch statistics are those of
    each share (averaged over the workers, through ``Comm``), and the server works on no samples
    unless it is the only rank. With ``sync_batch_norm`` the workers tell each other their
    statistics through ``Comm``: PyTorch's RPC has nothing for it.
    """

    name = "parameter_server"

    @property
    def workers(self) -> range:
        return range(1, self.comm.world_size) or range(1)

    def prepare(self) -> None:
        global _server
        if self.comm.rank == 0:
            _server = BatchServer(self.served, self.update_of([self.served]), len(self.workers))

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.gradient.zero_()
        sizes = self.common_sizes(batch_size)
        loss = self.gradients.add(inputs, targets, divisor=batch_size, sizes=sizes)
        if self.comm.rank in self.workers:
            with self.comm.span("communicate"):
                values, scaler = call_server(_push_and_wait, self.comm.rank, self.gradient.cpu())
                self.values.copy_(values)
                self.scaler.load_state_dict(scaler)
        else:
            # RPC's threads serve; this thread only waits for each update.
            with self.comm.span("wait"):
                _server.updates.acquire()
        return loss

    def optimizer_state(self, parameters: Mapping[str, Tensor]) -> State:
        """Copied, while the workers wait: the next update is made by a thread of RPC's."""
        found = State()
        if self.comm.rank == 0:
            mine = state_of_parameter(self.optimizer, "the parameters", self.served)
            copies = {key: value.clone() for key, value in mine.items()}
            found = cut(copies, only_trained(parameters))
        self.comm.barrier()
        return found

    def load_optimizer_state(self, parameters: Mapping[str, Tensor], state: State) -> None:
        mine = joined(state, only_trained(parameters))
        load_state_of_parameter(self.optimizer, self.served, mine)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_state(state)
        if self.comm.rank == 0:
            self.served.data.copy_(self.values)
        # RPC's threads would serve the first pushes before the server is as it was.
        self.comm.barrier()

    def end_epoch(self) -> None:
        average_buffers(self.comm, self.model, self.workers, self.sync_batch_norm)

    def full_state(self) -> State:
        if self.comm.rank == 0:
            self.values.copy_(self.served.detach())
        return super().full_state()


class RpcAsyncParameterServer(ServedByRpc, OwnPaceStrategy):
    """``AsyncParameterServer`` on ``torch.distributed.rpc``: one remote call per gradient.

    Each call runs in its own thread, and a lock lets only one at a time change the parameters.
    Epochs, batch statistics and notes are those of ``AsyncParameterServer``; staleness has no
    bound here, and a worker that dies ends the run, since RPC can only be shut down by all ranks.
    """

    name = "async_parameter_server"

    def __init__(
        self,
        accumulate: int = 1,
        amp: str | None = None,
        straggler: tuple[int, float] | None = None,
    ):
        super().__init__(accumulate, amp, straggler)

    def prepare(self) -> None:
        self.updates, self.lost = [], {}

    def train(self, batches: Iterator[Batch], steps: int, epochs: int) -> Iterator[EpochEnd]:
        if self.comm.rank == 0:
            yield from self.serve(steps * len(self.workers), epochs)
        else:
            self.comm.barrier()
            self.work(batches)

    def work(self, batches: Iterator[Batch]) -> None:
        """On a worker: compute a gradient, push and pull it, until the server says to stop."""
        version, goes_on = 0, True
        while goes_on:
            inputs, targets, batch_size = next(batches)
            self.gradient.zero_()
            loss = self.gradients.add(inputs, targets, divisor=batch_size)
            with self.comm.span("communicate"):
                sums = float(loss), float(self.right_of(len(targets))), len(targets)
                values, buffers, version, goes_on, scaler = call_server(
                    *(_push_and_pull, self.comm.rank, version, self.gradient.cpu()),
                    *(flat_buffers(self.model).cpu(), self.scaler.get_scale(), sums),
                )
                self._load(values, buffers)
                self.scaler.load_state_dict(scaler)

    def serve(self, shares: int, epochs: int) -> Iterator[EpochEnd]:
        """On the server: yield an ``EpochEnd`` per epoch, while RPC's threads serve."""
        global _server
        # As in ``AsyncParameterServer``, a push is a W-th of a step.
        clip_norm = self.clip_norm and self.clip_norm / len(self.workers)
        update = self.update_of([self.served], clip_norm=clip_norm)
        buffers = flat_buffers(self.model).cpu()
        _server = OwnPaceServer(self.served, update, buffers, shares, epochs)
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


def check_available(technique: str) -> None:
    """Raise ValueError if PyTorch is built without RPC, or if other people could call it, too."""
    if not rpc.is_available():
        raise ValueError(
            f"PyTorch {torch.__version__} on this system has no torch.distributed.rpc: run "
            f"{technique} without builtin, which is the same technique over labkit's own messages"
        )
    people = other_people()
    if people and os.environ.get(TRUST) != "1":
        raise ValueError(
            f"PyTorch's RPC runs what any process of this machine asks for, and other people use "
            f"this machine (user {', '.join(map(str, people))}): run {technique} without "
            f"builtin, or start Python with {TRUST}=1 if they may run code as you"
        )


def other_people() -> list[int]:
    """Ids of the other users who have processes here and are not system services."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.add(process.stat().st_uid)
    others = found - {os.geteuid()}
    return sorted(uid for uid in others if uid >= _FIRST_PERSON and uid not in _SERVICES)


def call_server(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on rank 0 and wait for its result, or for the exception that it raises."""
    try:
        return rpc.rpc_sync("rank0", function, args=arguments)
    except RuntimeError as error:
        if "originated at tensorpipe" not in str(error):
            raise
        raise PeerLostError(f"a remote call to rank 0 broke off: {error}", rank=0) from error


def join_rpc(comm: Comm) -> None:
    """Start RPC; the ranks find each other in their process group's store, without a new port."""
    if loopback_or_chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ.setdefault("TP_SOCKET_IFNAME", loopback_or_chosen)
    # RPC changes the store's timeout, so it gets its own connection.
    store = dist.distributed_c10d._get_default_store().clone()
    meetings = store.add(f"labkit/rpc/{comm.rank}", 1)

    def handler(
        url: str, timeout: timedelta = timedelta(), **_: Any
    ) -> Iterator[tuple[dist.Store, int, int]]:
        yield dist.PrefixStore(f"labkit/rpc/{meetings}", store), comm.rank, comm.world_size

    scheme = f"labkit{meetings}"
    register_rendezvous_handler(scheme, handler)
    with warnings.catch_warnings():
        # PyTorch itself causes this warning: it uses a deprecated kind of group.
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        rpc.init_rpc(
            f"rank{comm.rank}",
            rank=comm.rank,
            world_size=comm.world_size,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                init_method=f"{scheme}://", rpc_timeout=_PATIENCE_S
            ),
        )
