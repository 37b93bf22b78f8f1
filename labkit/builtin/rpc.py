"""Parameter servers on PyTorch's RPC: our techniques, whose pushes and pulls are remote calls.

One remote call is push and pull at once: its argument is the worker's gradient, its result the
new values. RPC's bytes bypass ``Comm``, so they are not counted; they pass through host memory.
Functions and arguments are sent as pickles, and RPC does not check who sends them: SECURITY.md.

A call that waited for the other workers would occupy one of the server's few RPC threads. So it
puts the push into a queue and returns a ``Future``, which the server's own thread completes.

Source: PyTorch, "Implementing batch RPC processing using asynchronous executions".
"""

import contextlib
import os
import queue
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler
from torch.distributed.rpc.functions import async_execution
from torch.futures import Future

from labkit.engine.comm.comm import Comm
from labkit.engine.errors import PeerLostError
from labkit.strategies.async_parameter_server import AsyncParameterServer
from labkit.strategies.base import MakeOptimizer, Strategy
from labkit.strategies.parameter_server import ParameterServer
from labkit.strategies.traits import Traits

# Waiting for a straggler is not an error, and the run has its own deadline.
_PATIENCE_S = 24 * 3600.0
# If this variable is 1, everyone on this machine may run code as this user.
TRUST = "LABKIT_TRUST_LOCAL_USERS"

# On a server: (worker, future of the answer, what it pushes). RPC calls a function by its name, so
# the function finds the queue only as a global.
_pushes: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()


@async_execution
def _push(worker: int, *tensors: Tensor) -> Future[Any]:
    answer: Future[Any] = Future()
    _pushes.put((worker, answer, *tensors))
    return answer


def call(server: int, worker: int, *tensors: Tensor) -> Any:
    """Push a worker's tensors to a server; the result is a future of its answer."""
    on_host = [tensor.cpu() for tensor in tensors]
    return rpc.rpc_async(f"rank{server}", _push, args=(worker, *on_host))


def answer_of(server: int, future: Any) -> Any:
    """Wait for what a server answers."""
    try:
        return future.wait()
    except RuntimeError as error:
        if "originated at tensorpipe" not in str(error):
            raise
        reason = f"a remote call to rank {server} broke off: {error}"
        raise PeerLostError(reason, rank=server) from error


class ByRpc(Strategy):
    """The base of both techniques: it starts and ends RPC."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_available()

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        super().setup(comm, model, make_optimizer)
        # Asynchronous: by worker, the future of the answer to its push, its report and gradient.
        self.pushes: dict[int, list[Any]] = {}
        join_rpc(comm)

    def close(self) -> None:
        """Wait until no rank makes calls any more, then end RPC on all ranks."""
        rpc.shutdown()


@dataclass(eq=False)
class RpcParameterServer(ByRpc, ParameterServer):
    """``ParameterServer`` on ``torch.distributed.rpc``; short messages still go through Comm."""

    traits = Traits(through_comm=False)

    def push(self) -> None:
        with self.comm.span("push"):
            self.calls = {}
            for server in self.peers:
                start, end = self.slice_bounds[server]
                self.calls[server] = call(server, self.comm.rank, self.gradient[start:end])

    def pull(self) -> None:
        with self.comm.span("pull"):
            for server, future in self.calls.items():
                start, end = self.slice_bounds[server]
                self.parameters[start:end] = answer_of(server, future)

    @torch.no_grad()
    def serve(self, factor: Tensor | float | None = None) -> None:
        with self.comm.span("push"):
            # In the order of the workers, not of their calls: a run can be repeated to the bit.
            pushes = sorted((_pushes.get() for _ in self.peers), key=lambda push: push[0])
            for turn, (_, _, gradient) in enumerate(pushes):
                gradient = gradient.to(self.comm.device)
                if turn == 0:
                    self.slice_gradient.copy_(gradient)
                else:
                    self.slice_gradient.add_(gradient)
        self.update(factor)
        # The values change only after every worker has pushed again, so no copy is needed.
        for _, answer, _ in pushes:
            answer.set_result(self.slice.cpu())


@dataclass(eq=False)
class RpcAsyncParameterServer(ByRpc, AsyncParameterServer):
    """``AsyncParameterServer`` on ``torch.distributed.rpc``: one remote call per gradient.

    A worker that dies ends the run, since RPC can only be shut down by all ranks.
    """

    traits = replace(AsyncParameterServer.traits, through_comm=False, survives_lost_workers=False)

    def push_and_pull(self, report: Tensor) -> Tensor:
        with self.comm.span("communicate"):
            values, goes_on = answer_of(0, call(0, self.comm.rank, report, self.gradient))
            self.values.copy_(values)
            return goes_on

    def recv_report(self) -> int:
        with self.comm.span("wait"):
            worker, *push = _pushes.get()
        self.pushes[worker] = push
        self.reports[worker] = push[1].to(self.comm.device)
        return worker

    def receive(self, worker: int) -> None:
        self.gradient.copy_(self.pushes[worker][2])

    def answer(self, worker: int, goes_on: Tensor) -> None:
        # A copy: the next update must not change values that are still being sent.
        values = self.values.detach().clone().cpu()
        self.pushes.pop(worker)[0].set_result((values, goes_on.cpu()))


def check_available() -> None:
    """Raise ValueError if other people could call the ranks, too."""
    people = other_people()
    if people and os.environ.get(TRUST) != "1":
        raise ValueError(
            "PyTorch's RPC runs what any process of this machine asks for, and it has other users "
            f"({', '.join(map(str, people))}): run without builtin, or with {TRUST}=1"
        )


def other_people() -> list[int]:
    """Ids of the other users who have processes here and are not system services."""
    users = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            users.add(process.stat().st_uid)
    # By login.defs(5) ids of people begin at 1000; systemd's dynamic users are services.
    services = range(61_184, 65_520)
    users -= {os.geteuid()}
    return sorted(user for user in users if user >= 1000 and user not in services)


def join_rpc(comm: Comm) -> None:
    """Start RPC; the ranks find each other in their process group's store, without a new port."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if interface:
        os.environ.setdefault("TP_SOCKET_IFNAME", interface)
    # RPC changes the store's timeout, so it gets its own connection.
    store = dist.distributed_c10d._get_default_store().clone()
    number = store.add(f"labkit/rpc/{comm.rank}", 1)
    scheme = f"labkit{number}"

    def rendezvous(*_: Any, **__: Any) -> Iterator[tuple[dist.Store, int, int]]:
        yield dist.PrefixStore(scheme, store), comm.rank, comm.world_size

    register_rendezvous_handler(scheme, rendezvous)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"{scheme}://", rpc_timeout=_PATIENCE_S)
    with warnings.catch_warnings():
        # PyTorch itself causes this warning: it uses a deprecated kind of group.
        warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
        rpc.init_rpc(
            f"rank{comm.rank}",
            rank=comm.rank,
            world_size=comm.world_size,
            rpc_backend_options=options,
        )
