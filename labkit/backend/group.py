"""The ``torch.distributed`` backend "labkit": PyTorch's own training on our collectives.

    import labkit
    torch.distributed.init_process_group("labkit")      # or new_group(backend="labkit")
    model = DistributedDataParallel(model)

Ranks of one machine meet in shared memory (``labkit.engine.comm.shared_memory``); on several
machines the same collectives run over gloo's point-to-point. ``labkit.backend.use(my_ring)`` puts
another all-reduce below DDP. One queue carries out the collectives, in the order of the calls;
sends and receives have one queue per edge and direction, since they may wait for each other.
"""

import atexit
import contextlib
import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.backend.mailbox import Mailbox
from labkit.backend.operations import METHODS, Call
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.rendezvous import separate_comm
from labkit.engine.comm.transport import Traffic
from labkit.engine.comm.work import AllOf, Work, WorkQueue

# PyTorch's flight recorder listens to hooks that a group in Python never calls, and would fail.
getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("labkit")

# Untyped: the overloads of the C++ class in PyTorch's stubs do not apply to a group in Python.
ProcessGroup: Any = dist.ProcessGroup

# How long the end of the program waits for a thread that is inside a learner's function.
_LAST_PATIENCE_S = 2.0

# The counters of every group of this process; kept after a group is destroyed.
_traffic: list[Traffic] = []


def sent() -> tuple[int, int]:
    """Return the messages and bytes that this rank's "labkit" groups have sent so far."""
    messages = sum(traffic.messages for traffic in _traffic)
    num_bytes = sum(traffic.num_bytes for traffic in _traffic)
    return messages, num_bytes


class LabkitGroup(ProcessGroup):
    """A process group whose collectives are ``labkit.collectives``, for CPU tensors.

    It implements the methods of PyTorch's ``ProcessGroup``, which determines their names and the
    lists that they take. A collective (``labkit.backend.operations``) checks its arguments, is
    queued, and returns its ``Work``.

    Raises (from the method): ValueError for what is not supported. (From ``wait`` of the ``Work``
    returned): MismatchError when the ranks call different collectives, PeerLostError when a rank
    has ended, TimeoutError when an operation takes longer than ``timeout``.
    """

    # ``dist.split_group`` asks the group's backend for these; here that is the group itself.
    supports_splitting = True
    supports_coalescing = False
    # PyTorch's own ProcessGroup gets these from its backends.
    group_name = group_desc = ""
    _device_types: Sequence[torch.device] = (torch.device("cpu"),)

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int] | None = None,
    ):
        super().__init__(rank, size)
        self._store = store
        self._timeout = timeout
        # As they are numbered in the run.
        self._ranks = ranks or range(size)
        # Messages of an edge are first in, first out, so each kind of traffic has its own Comm.
        self._comms: dict[str, Comm] = {}
        for purpose in ("collectives", "pairs"):
            comm = separate_comm(purpose, store, rank, size, timeout, self._ranks)
            self._comms[purpose] = comm
            _traffic.append(comm.transport.sent)
        self._queues: dict[tuple[Any, ...], WorkQueue] = {}
        self._starting = threading.Lock()
        self._num_collectives = 0
        # Between start and end of coalescing: the operations called since.
        self._coalesced: list[Work] | None = None
        peers = set(range(size)) - {rank}
        queue_of_edge = partial(self._queue_of, "pairs")
        self._mailbox = Mailbox(peers, queue_of_edge, timeout.total_seconds())
        _live.add(self)

    # The signatures below are PyTorch's. The collectives are added from the table ``METHODS``.

    def getBackendName(self):
        return "labkit"

    name = getBackendName

    def _set_group_name(self, name):
        self.group_name = name

    def _set_group_desc(self, description):
        self.group_desc = description

    def get_group_store(self):
        return self._store

    def get_backend(self, device):
        if torch.device(device).type != "cpu":
            raise RuntimeError(f'the "labkit" backend is for CPU tensors, not for {device}')
        return self

    _get_backend = get_backend

    def set_timeout(self, timeout):
        """Set the longest wait from now on, also for operations under way."""
        self._timeout = timeout
        timeout_s = timeout.total_seconds()
        self._mailbox.timeout_s = timeout_s
        for queue in self._queues.values():
            queue.timeout_s = timeout_s
        for comm in self._comms.values():
            comm.transport.set_timeout(timeout_s)

    def split_group(
        self, ranks, timeout=None, opts=None, group_name="", group_desc="", device_types=None
    ):
        """Make a group of ``ranks``, in that order; return None on the ranks left out."""
        if self.rank() not in ranks:
            return None
        store = dist.PrefixStore(f"labkit/split/{group_name}", self._store)
        timeout = timeout or self._timeout
        ranks_in_run = [self._ranks[rank] for rank in ranks]
        group = LabkitGroup(store, ranks.index(self.rank()), len(ranks), timeout, ranks_in_run)
        group.group_name = group_name or ""
        group.group_desc = group_desc or ""
        return group

    def _comm(self, purpose: str) -> Comm:
        if not self._comms:
            raise ValueError("this process group was destroyed: make another with new_group")
        return self._comms[purpose]

    def _queue_of(self, *key: Any) -> WorkQueue:
        """Return the queue of ("collectives",) or ("pairs", "to" or "from", a peer)."""
        comm = self._comm(key[0])
        with self._starting:
            if key not in self._queues:
                name = "-".join(["labkit", *map(str, key)])
                self._queues[key] = WorkQueue(name, comm, self._timeout.total_seconds())
            return self._queues[key]

    def _queue(self, call: Call) -> Work:
        """Queue a collective, or carry it out at once when PyTorch is going to wait for it."""
        is_waited_for = not getattr(call.opts, "asyncOp", True)
        name = call.name
        if any(tensor.is_sparse for tensor in call.inputs):
            name = f"sparse_{name}"
        self._num_collectives += 1
        queue = self._queue_of("collectives")
        work = queue.add(name, lambda _: call.run(), call.inputs, call.outputs, is_waited_for)
        return self._add_to_coalesced(work)

    def _add_to_coalesced(self, work: Work) -> Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device="cpu"):
        self.get_backend(device)
        self._coalesced = []

    def _end_coalescing(self, device="cpu") -> Any:
        """Return one ``Work`` for all calls since the start; nothing is put together."""
        works = self._coalesced or []
        self._coalesced = None
        return AllOf(works)

    def _set_sequence_number_for_group(self):
        self._num_collectives = 0

    def _get_sequence_number_for_group(self):
        """Return the number of collectives that this rank has called."""
        return self._num_collectives

    def _wait_for_pending_works(self):
        """Wait until all that was called has ended, but for receives."""
        for key, queue in list(self._queues.items()):
            if "from" not in key:
                queue.add("", lambda comm: None, [], []).wait()

    def barrier(self, opts=None):
        return self._queue(Call("barrier", self._comm("collectives").barrier, [], [], opts))

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """Wait until all ranks have come; the error names the first that has not, or all.

        It needs only the store. So it works while a rank is stuck in a collective. Programs match
        the words of gloo's error.
        """
        store = self._store
        timeout = self._timeout if timeout is None else timeout
        if not timeout:
            raise RuntimeError(
                f"Rank {self.rank()} timed out in monitoredBarrier: give it a timeout above 0 s"
            )
        number = store.add(f"labkit/monitored/{self.rank()}", 1)
        keys = [f"labkit/monitored/{number}/{rank}" for rank in range(self.size())]
        store.set(keys[self.rank()], "came")
        with contextlib.suppress(RuntimeError):
            store.wait(keys, timeout)
        missing = [str(rank) for rank, key in enumerate(keys) if not store.check([key])]
        if missing:
            names = f"Ranks {', '.join(missing)}" if wait_all_ranks else f"Rank {missing[0]}"
            raise RuntimeError(
                f"{names} failed to pass monitoredBarrier: did not call it within "
                f"{timeout.total_seconds():g} s of rank {self.rank()}"
            )

    def send(self, tensors, dst, tag):
        return self._add_to_coalesced(self._mailbox.send(tensors[0], dst, tag))

    def recv(self, tensors, src, tag):
        return self._add_to_coalesced(self._mailbox.recv(tensors[0], src, tag))

    def recv_anysource(self, tensors, tag):
        return self.recv(tensors, None, tag)

    def shutdown(self, patience_s: float | None = None) -> None:
        """End the threads after all queued operations; PyTorch calls this to destroy the group.

        An operation that takes longer than the group's timeout is left running, with a warning.
        With ``patience_s`` queued operations are dropped.
        """
        queues, self._queues = self._queues, {}
        comms, self._comms = self._comms, {}
        # The queues that read end last: a receive from any source reads from all edges.
        for key in sorted(queues, key=lambda key: "from" in key):
            if "from" in key or patience_s is not None:
                comms[key[0]].transport.abandon()
            if not queues[key].end(patience_s) and patience_s is None:
                # After an error here, PyTorch would keep the group registered.
                work = queues[key].under_way
                warnings.warn(
                    f"this process group has ended, but {work} is still running", stacklevel=2
                )
        for comm in comms.values():
            comm.session.leave()

    def abort(self) -> None:
        """End the group at once, without its queued operations."""
        self.shutdown(_LAST_PATIENCE_S)


def _method(name: str, prepare: Callable[..., Call]) -> Callable[..., Work]:
    """Return a method of ``LabkitGroup`` that checks its arguments, and queues the collective."""

    def method(self: LabkitGroup, *args: Any, **options: Any) -> Work:
        return self._queue(prepare(self._comm("collectives"), *args, **options))

    method.__name__ = name
    method.__doc__ = prepare.__doc__
    return method


for _name, _prepare in METHODS.items():
    setattr(LabkitGroup, _name, _method(_name, _prepare))

_live: weakref.WeakSet[LabkitGroup] = weakref.WeakSet()
# A forked child is not a rank: its exit must not end the queues of the rank.
os.register_at_fork(after_in_child=_live.clear)


@atexit.register
def abandon_all() -> None:
    """End the queues of all groups of this process, at its end, and wait for no other rank."""
    # A thread that is inside PyTorch when the interpreter ends would abort the process.
    for group in list(_live):
        group.shutdown(_LAST_PATIENCE_S)


def _keep_compilers_out() -> None:
    """Make torch.compile leave these methods, and the functions they call, uncompiled."""
    frames = torch._C._dynamo.eval_frame
    as_it_is = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for method in (*vars(LabkitGroup).values(), *vars(Work).values()):
        if inspect.isfunction(method):
            frames.set_code_exec_strategy(method.__code__, as_it_is)


_keep_compilers_out()
