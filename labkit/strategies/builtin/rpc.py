"""Parameter servers on PyTorch's RPC, next to the ranks' process group.

A rank calls a function on another and waits for its result; RPC's own threads run it. Here rank 0
is the server, and one remote call is push and pull at once: its argument is the worker's gradient,
its result the new values. RPC's bytes bypass ``Comm``, so they are not counted; they pass through
host memory. Functions and arguments are sent as pickles, and RPC does not check who sends them:
see SECURITY.md.

A call must not block until the other workers have called: it would occupy one of the server's few
RPC threads. So it puts the push into a queue and returns a ``Future`` at once; rank 0's own thread
makes the updates, and completes the futures.

Source: PyTorch, "Implementing batch RPC processing using asynchronous executions".
"""

import contextlib
import os
import queue
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from labkit.comm.comm import Comm
from labkit.errors import PeerLostError
from labkit.strategies.base import Batch, EpochEnd, MakeOptimizer, OnShares, OwnPaceStrategy
from labkit.strategies.flat_parameters import (
    average_buffers,
    flat_buffers,
    lay_end_to_end,
    load_flat_buffers,
)
from labkit.strategies.state import State, cut, joined, load_state_of_parameter, state_of_parameter

# Waiting for a straggler is not an error, and the run has its own deadline.
_PATIENCE_S = 24 * 3600.0
# If this variable is 1, everyone on this machine may run code as this user.
TRUST = "LABKIT_TRUST_LOCAL_USERS"

# On rank 0: (future of the answer, worker, what it pushes). RPC calls a function by its name, so
# the function finds the queue only as a global.
_pushes: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()


@async_execution
def _push(*arguments: Any) -> Future[Any]:
    answer: Future[Any] = Future()
    _pushes.put((answer, *arguments))
    return answer


def push_and_pull(*arguments: Any) -> Any:
    """On a worker: push to rank 0, and wait for the answer."""
    try:
        return rpc.rpc_sync("rank0", _push, args=arguments)
    except RuntimeError as error:
        if "originated at tensorpipe" not in str(error):
            raise
        raise PeerLostError(f"a remote call to rank 0 broke off: {error}", rank=0) from error


@dataclass(eq=False)
class ServedByRpc(OnShares):
    """A technique whose workers push and pull by remote calls to rank 0."""

    straggler: tuple[int, float] | None = None
    servers = 1
    optimizes = "elements"
    through_comm = False

    def __post_init__(self) -> None:
        check_available()
        super().__post_init__()

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.check_ranks(comm.world_size)
        self.place(comm, model)
        self.compute_with(self.model)
        self.values, self.gradient = lay_end_to_end(self.model)
        if comm.rank == 0:
            self.flat = nn.Parameter(self.values)
            self.flat.grad = self.gradient
            self.optimizer = make_optimizer([self.flat])
            self.update = self.update_of([self.flat])
        join_rpc(comm)

    def close(self) -> None:
        """Wait until no rank makes calls any more, then end RPC on all ranks."""
        rpc.shutdown()


@dataclass(eq=False)
class RpcParameterServer(ServedByRpc):
    """``ParameterServer`` with one server, on ``torch.distributed.rpc``.

    The contract is the same: the result equals that of one device, batch statistics are those of
    each share (averaged over the workers, through ``Comm``), and the server works on no samples;
    a rank that is alone is one device. With ``sync_batch_norm`` the workers tell each other their
    statistics through ``Comm``: PyTorch's RPC has nothing for it.
    """

    sync_batch_norm: bool = False

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.gradient.zero_()
        loss = self.gradients.add(inputs, targets, batch_size)
        if self.comm.rank == 0:
            self.serve()
        else:
            with self.comm.span("communicate"):
                values, scaler = push_and_pull(self.comm.rank, self.gradient.cpu())
                self.values.copy_(values)
                self.scaler.load_state_dict(scaler)
        return loss

    def serve(self) -> None:
        """On rank 0: collect one gradient [N] from each of the other ranks, update, answer all."""
        with self.comm.span("wait"):
            pushes = [_pushes.get() for _ in range(1, self.comm.world_size)]
        with self.comm.span("update"):
            # In the order of the workers, not of their calls: a run can be repeated to the bit.
            for _, _, gradient in sorted(pushes, key=lambda push: push[1]):
                self.gradient += gradient.to(self.comm.device)
            self.update()
        # The values change only after every worker has pushed again, so no copy is needed.
        for answer, *_ in pushes:
            answer.set_result((self.values.cpu(), self.scaler.state_dict()))

    def optimizer_state(self, parameters: Mapping[str, Tensor]) -> State:
        if self.comm.rank:
            return {}
        return cut(state_of_parameter(self.optimizer, self.flat), parameters)

    def load_optimizer_state(self, parameters: Mapping[str, Tensor], state: State) -> None:
        load_state_of_parameter(self.optimizer, self.flat, joined(state, parameters))

    def end_epoch(self) -> None:
        average_buffers(self.comm, self.model, self.workers, self.sync_batch_norm)


@dataclass(eq=False)
class RpcAsyncParameterServer(ServedByRpc, OwnPaceStrategy):
    """``AsyncParameterServer`` on ``torch.distributed.rpc``: one remote call per gradient.

    Epochs, batch statistics and notes are those of ``AsyncParameterServer``; staleness has no
    bound here, and a worker that dies ends the run, since RPC can only be shut down by all ranks.
    """

    def train(self, batches: Iterator[Batch], steps: int, epochs: int) -> Iterator[EpochEnd]:
        if self.comm.rank == 0:
            yield from self.serve(steps * len(self.workers), epochs)
        else:
            self.work(batches)

    def work(self, batches: Iterator[Batch]) -> None:
        """On a worker: compute a gradient, push and pull it, until the server says to stop."""
        version, goes_on = 0, True
        while goes_on:
            inputs, targets, batch_size = next(batches)
            self.gradient.zero_()
            loss = self.gradients.add(inputs, targets, batch_size)
            with self.comm.span("communicate"):
                sums = float(loss), float(self.right_of(len(targets))), len(targets)
                values, buffers, version, goes_on, scaler = push_and_pull(
                    *(self.comm.rank, version, self.gradient.cpu()),
                    *(flat_buffers(self.model).cpu(), self.scaler.get_scale(), sums),
                )
                self.values.copy_(values)
                load_flat_buffers(self.model, buffers)
                self.scaler.load_state_dict(scaler)

    def serve(self, shares: int, epochs: int) -> Iterator[EpochEnd]:
        """On rank 0: apply each gradient when it comes; ``shares`` of them are an epoch."""
        # As in ``AsyncParameterServer``, a push is a W-th of a step.
        self.update.clip_norm = self.clip_norm and self.clip_norm / len(self.workers)
        # Of this epoch: the sum of losses, right predictions, samples.
        sums = torch.zeros(3, dtype=torch.float64)
        start_s, last = time.perf_counter(), shares * epochs
        # Each worker but the one of the last push is told to stop at its next, which is ignored.
        for done in range(1, last + len(self.workers)):
            with self.comm.span("wait"):
                answer, worker, version, gradient, buffers, scale, of_share = _pushes.get()
            if done <= last:
                sums += torch.tensor(of_share, dtype=torch.float64)
            # An empty share makes no update.
            if done <= last and of_share[-1]:
                with self.comm.span("update"):
                    self.gradient.copy_(gradient)
                    load_flat_buffers(self.model, buffers)
                    if self.update(scale):
                        self.updates.append([worker, len(self.updates) - version])
            if done <= last and done % shares == 0:
                loss, self.accuracy, _ = sums / sums[2]
                yield time.perf_counter() - start_s, loss
                sums.zero_()
            # A copy: the next update must not change values that are still being sent.
            values, buffers = self.values.detach().clone().cpu(), flat_buffers(self.model).cpu()
            scaler = self.scaler.state_dict()
            answer.set_result((values, buffers, len(self.updates), done < last, scaler))


def check_available() -> None:
    """Raise ValueError if PyTorch is built without RPC, or if other people could call it, too."""
    if not rpc.is_available():
        raise ValueError(
            f"PyTorch {torch.__version__} on this system has no torch.distributed.rpc: run "
            "without builtin, which is the same technique over labkit's own messages"
        )
    people = other_people()
    if people and os.environ.get(TRUST) != "1":
        raise ValueError(
            f"PyTorch's RPC runs what any process of this machine asks for, and other people use "
            f"this machine (user {', '.join(map(str, people))}): run without builtin, or start "
            f"Python with {TRUST}=1 if they may run code as you"
        )


def other_people() -> list[int]:
    """Ids of the other users who have processes here and are not system services."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            found.add(process.stat().st_uid)
    # By login.defs(5) ids of people begin at 1000; systemd's dynamic users are services.
    services = range(61_184, 65_520)
    return sorted(u for u in found - {os.geteuid()} if u >= 1000 and u not in services)


def join_rpc(comm: Comm) -> None:
    """Start RPC; the ranks find each other in their process group's store, without a new port."""
    if loopback_or_chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ.setdefault("TP_SOCKET_IFNAME", loopback_or_chosen)
    # RPC changes the store's timeout, so it gets its own connection.
    store = dist.distributed_c10d._get_default_store().clone()
    meeting = f"labkit{store.add(f'labkit/rpc/{comm.rank}', 1)}"

    def meet(*_: Any, **__: Any) -> Iterator[tuple[dist.Store, int, int]]:
        yield dist.PrefixStore(meeting, store), comm.rank, comm.world_size

    register_rendezvous_handler(meeting, meet)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"{meeting}://", rpc_timeout=_PATIENCE_S)
    with warnings.catch_warnings():
        # PyTorch itself causes this warning: it uses a deprecated kind of group.
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        rpc.init_rpc(
            f"rank{comm.rank}",
            rank=comm.rank,
            world_size=comm.world_size,
            rpc_backend_options=options,
        )
