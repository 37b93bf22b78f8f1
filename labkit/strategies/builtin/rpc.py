"""PyTorch's RPC, next to the ranks' process group, and the base of the techniques that use it.

A rank calls a function on another and waits for its result; RPC's own threads run it. Functions
and arguments are sent as pickles, and RPC does not check who sends them: see SECURITY.md.

Here rank 0 is the server, and one remote call is push and pull at once: its argument is the
worker's gradient, its result the new values. RPC's bytes bypass ``Comm``, so they are not counted;
they pass through host memory.
"""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import rpc
from torch.distributed.rendezvous import register_rendezvous_handler

from labkit.comm.comm import Comm
from labkit.errors import PeerLostError
from labkit.strategies.base import MakeOptimizer, Strategy
from labkit.strategies.flat_parameters import lay_end_to_end
from labkit.strategies.local_gradients import LocalGradients, check_straggler
from labkit.strategies.sync_batch_norm import convert

# Waiting for a straggler is not an error, and the run has its own deadline.
_PATIENCE_S = 24 * 3600.0
# If this variable is 1, everyone on this machine may run code as this user.
TRUST = "LABKIT_TRUST_LOCAL_USERS"
# By login.defs(5) the user ids of people begin here; ids from a directory service are far higher.
_FIRST_PERSON = 1000
# The ids of systemd's dynamic users, which are services.
_SERVICES = range(61_184, 65_520)


class ServedByRpc(Strategy):
    """A technique whose workers push and pull by remote calls to rank 0.

    Args:
        accumulate, amp, straggler: see ``LocalGradients``.

    Raises:
        ValueError: this PyTorch has no RPC, other users of this machine could call it, or the
            straggler would be the server.
    """

    optimizes = "elements"
    through_comm = False
    name: str

    def __init__(
        self,
        accumulate: int = 1,
        amp: str | None = None,
        straggler: tuple[int, float] | None = None,
    ):
        check_available(self.name)
        check_straggler(straggler)
        self.settings = {"accumulate": accumulate, "amp": amp, "straggler": straggler}

    def setup(self, comm: Comm, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self.check_ranks(comm.world_size)
        self.comm, self.make_optimizer = comm, make_optimizer
        self.model = model.to(comm.device).train()
        if self.sync_batch_norm and comm.rank in self.workers:
            count = self.settings["accumulate"]
            self.global_batch = convert(self.model, comm, self.workers, count)
        self.local = LocalGradients(
            comm, self.model, loss=self.loss, global_batch=self.global_batch, **self.settings
        )
        self.scaler = self.local.scaler
        self.values, self.gradient = lay_end_to_end(self.model)
        self.prepare()
        join_rpc(comm)

    def prepare(self) -> None:
        """Make what has to exist before the first remote call."""
        raise NotImplementedError

    def settings_of_update(self) -> dict[str, Any]:
        """Of the server's ``Update`` of all parameters, which are flat."""
        sizes = [p.numel() for p in self.model.parameters() if p.requires_grad]
        return {"clip_norm": self.clip_norm, "scaler": self.scaler, "sizes": sizes}

    def close(self) -> None:
        """Wait until no rank makes calls any more, then end RPC on all ranks."""
        rpc.shutdown()


def async_execution(function: Callable[..., Any]) -> Callable[..., Any]:
    """``rpc.functions.async_execution`` where RPC exists, for a function that returns a Future."""
    return rpc.functions.async_execution(function) if rpc.is_available() else function


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
    """Call a function on rank 0 and wait for its result.

    Raises:
        PeerLostError: the server has ended.
        Any exception of the function.
    """
    try:
        return rpc.rpc_sync(name_of(0), function, args=arguments)
    except RuntimeError as error:
        if "originated at tensorpipe" not in str(error):
            raise
        raise PeerLostError(f"a remote call to rank 0 broke off: {error}", rank=0) from error


def name_of(rank: int) -> str:
    """The name of a rank in RPC."""
    return f"rank{rank}"


def join_rpc(comm: Comm) -> None:
    """Start RPC next to the ranks' process group; the ranks find each other in its store.

    So RPC needs no second free port and no second address.
    """
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
            name_of(comm.rank),
            rank=comm.rank,
            world_size=comm.world_size,
            rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
                init_method=f"{scheme}://", rpc_timeout=_PATIENCE_S
            ),
        )
