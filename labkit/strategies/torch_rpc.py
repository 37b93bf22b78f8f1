"""Parameter servers on PyTorch's RPC: a worker calls a function of the server's, and gets values.

Rank 0 serves. One remote call is push and pull at once: its argument is the worker's gradient, its
result the new values. The callee must not sit and wait for the other workers inside such a call:
each waiting call keeps one of the server's few RPC threads, and with more workers than threads
nobody is left to receive the last gradient. So the call returns a ``Future``, and its thread is
free; whoever brings the last gradient makes the update and completes the future for all.

RPC moves its bytes past ``Comm``, so they are not counted, and through host memory.
Source: PyTorch, "Implementing batch RPC processing using asynchronous executions".
"""

import os
import threading
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from labkit.comm import Comm
from labkit.errors import PeerLostError
from labkit.flat import average_buffers, lay_end_to_end
from labkit.local_gradients import LocalGradients
from labkit.models import logits_of, state_of

# Waiting for a straggler is no error; the run has a deadline of its own.
_PATIENCE_S = 24 * 3600.0
_MEETING_S = 60.0

# RPC finds a function by its name, so that function has to find its server by name, too.
_server = None


def _async_execution(function: Callable) -> Callable:
    return rpc.functions.async_execution(function) if rpc.is_available() else function


@_async_execution
def _push_and_pull(worker: int, gradient: Tensor) -> "torch.futures.Future[Tensor]":
    return _server.push_and_pull(worker, gradient)


class BatchServer:
    """Collects one gradient from each worker, then updates: synchronous.

    Args:
        values: [N], updated in place.
        optimizer: of a parameter that ``values`` is the memory of.
        workers: how many gradients make an update.
    """

    def __init__(self, values: nn.Parameter, optimizer: torch.optim.Optimizer, workers: int):
        self.values, self.optimizer, self.workers = values, optimizer, workers
        self.updates = threading.Semaphore(0)
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._pushed: dict[int, Tensor] = {}
        self._updated = torch.futures.Future()

    def push_and_pull(self, worker: int, gradient: Tensor) -> "torch.futures.Future[Tensor]":
        with self._lock:
            updated = self._updated
            self._pushed[worker] = gradient
            if len(self._pushed) < self.workers:
                return updated
            # In the order of the workers, whoever came first: so a run can be repeated to the bit.
            self.values.grad = sum(self._pushed[worker] for worker in sorted(self._pushed))
            self.optimizer.step()
            self._begin()
        # Nobody pushes again before the answer has reached all, so no copy is needed.
        updated.set_result(self.values.detach())
        self.updates.release()
        return updated


class RpcParameterServer:
    """``ParameterServer`` with one server, on ``torch.distributed.rpc``; see the module.

    The contract is the same: equal to one device, batch statistics by share (averaged over the
    workers, through ``Comm``), no samples on the server unless it is alone.

    Args:
        accumulate, straggler: see ``LocalGradients``.

    Raises:
        ValueError: this PyTorch has no RPC; or the straggler would be the server.
    """

    def __init__(self, accumulate: int = 1, straggler: tuple[int, float] | None = None):
        check_available("parameter_server")
        if straggler and straggler[0] == 0:
            raise ValueError("straggler 0: rank 0 serves and computes nothing, choose a worker")
        self.settings = {"accumulate": accumulate, "straggler": straggler}

    def setup(self, comm: Comm, model: nn.Module, make_optimizer) -> None:
        global _server
        self.comm = comm
        self.model = model.to(comm.device).train()
        self.local = LocalGradients(comm, self.model, **self.settings)
        self.values, self.gradient = lay_end_to_end(self.model)
        self.workers = range(1, comm.world_size) or range(1)
        if comm.rank == 0:
            served = nn.Parameter(self.values.cpu())
            _server = BatchServer(served, make_optimizer([served]), len(self.workers))
        join_rpc(comm)

    def share(self) -> tuple[int, int]:
        if self.comm.rank not in self.workers:
            return 0, 0
        return self.workers.index(self.comm.rank), len(self.workers)

    def step(self, inputs: Tensor, targets: Tensor, batch_size: int) -> Tensor:
        self.gradient.zero_()
        loss = self.local.add(inputs, targets, divisor=batch_size)
        if self.comm.rank in self.workers:
            with self.comm.span("communicate"):
                arguments = self.comm.rank, self.gradient.cpu()
                self.values.copy_(call_server(_push_and_pull, *arguments))
        else:
            # RPC's threads serve; this one only keeps step.
            with self.comm.span("wait"):
                _server.updates.acquire()
        return loss

    def predict(self, inputs: Tensor) -> Tensor:
        return logits_of(self.model, inputs)

    def end_epoch(self) -> None:
        average_buffers(self.comm, self.model, self.workers)

    def full_state(self) -> dict[str, Tensor]:
        if self.comm.rank == 0:
            self.values.copy_(_server.values.detach())
        return state_of(self.model)

    def close(self) -> None:
        leave_rpc()


def check_available(technique: str) -> None:
    """ValueError where this PyTorch is built without RPC."""
    if not rpc.is_available():
        raise ValueError(
            f"PyTorch {torch.__version__} on this system has no torch.distributed.rpc: run "
            f"{technique} without builtin, which is the same technique over labkit's own messages"
        )


def call_server(function: Callable, *arguments):
    """Call a function on rank 0 and wait for its result.

    Raises:
        PeerLostError: the server has ended.
        Whatever the function raises there.
    """
    try:
        return rpc.rpc_sync(name_of(0), function, args=arguments)
    except RuntimeError as error:
        if "originated at tensorpipe" not in str(error):
            raise
        raise PeerLostError(f"a remote call of rank 0 broke off: {error}", rank=0) from error


def name_of(rank: int) -> str:
    """What RPC calls a rank."""
    return f"rank{rank}"


def join_rpc(comm: Comm) -> None:
    """Start RPC beside the ranks' own process group; they find each other through its store.

    So there is no second port to be free, and no second address to be wrong.
    """
    if loopback_or_chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ.setdefault("TP_SOCKET_IFNAME", loopback_or_chosen)
    # RPC sets the store's timeout: not on the one that others use.
    store = dist.distributed_c10d._get_default_store().clone()
    meetings = store.add(f"labkit/rpc/{comm.rank}", 1)

    def handler(url: str, timeout: timedelta = timedelta(seconds=_MEETING_S), **_):
        yield dist.PrefixStore(f"labkit/rpc/{meetings}", store), comm.rank, comm.world_size

    scheme = f"labkit{meetings}"
    register_rendezvous_handler(scheme, handler)
    with warnings.catch_warnings():
        # Of PyTorch's own code, which gathers the devices through a deprecated kind of group.
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        rpc.init_rpc(
            name_of(comm.rank),
            rank=comm.rank,
            world_size=comm.world_size,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                init_method=f"{scheme}://", rpc_timeout=_PATIENCE_S
            ),
        )


def leave_rpc() -> None:
    """Wait until no rank calls any more, then end RPC on all of them."""
    global _server
    rpc.shutdown()
    _server = None
