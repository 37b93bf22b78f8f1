"""The ``torch.distributed`` backend "labkit": PyTorch's own training on our collectives.

    import labkit
    torch.distributed.init_process_group("labkit")      # or new_group(backend="labkit")
    model = DistributedDataParallel(model)

Ranks of one machine meet in shared memory (``labkit.comm.shared_memory``); on several machines the
same collectives run over gloo's point-to-point. ``use(my_ring)`` puts another all-reduce below
DDP.

PyTorch calls a method of ``ProcessGroup`` and gets a ``Work``, the receipt of an operation under
way. One thread a group carries out the collectives in the order of the calls, as the learner's
function on ``Comm``; sends and receives have a thread an edge, since they may wait for each other.
What is not served stands in ``labkit.backend.arguments.REFUSED``, with its reason.
"""

import atexit
import inspect
import os
import threading
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from labkit import collectives
from labkit.backend.arguments import (
    REFUSED,
    check_outputs,
    copy_all,
    equal_parts,
    reduction_of,
    refusal,
    split_parts,
)
from labkit.backend.mailbox import Mailbox
from labkit.backend.monitored import monitored_barrier
from labkit.collectives import fast_ring_all_reduce
from labkit.collectives.common import check_fits, in_place
from labkit.comm.comm import Comm
from labkit.comm.meeting import meet, stay_on_loopback
from labkit.comm.shared_transport import SharedTransport
from labkit.comm.transports import TorchTransport, Traffic
from labkit.comm.work import Line, Task

AllReduce = Callable[[Comm, Tensor], Tensor | None]

# PyTorch's flight recorder listens to hooks that a group in Python never calls, and would fail.
getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("labkit")
# Spans that a group keeps: a training of days must not fill the memory with them.
_KEPT_SPANS = 10_000
_CPU = torch.device("cpu")
# How long the end of the program waits for a thread that is inside a learner's function.
_LAST_PATIENCE_S = 2.0

_learners: AllReduce | None = None


def use(all_reduce: AllReduce | None) -> None:
    """Let every "labkit" group of this process, and ``ddp_hook``, sum with ``all_reduce``.

    Args:
        all_reduce: ``all_reduce(comm, tensor)`` sums a flat tensor [N] over the ranks, in place
            or by returning the sum; None goes back to ``fast_ring_all_reduce``.

    Call it on every rank. DDP only ever asks for sums; other reductions stay with labkit.
    """
    global _learners
    if all_reduce is not None and not callable(all_reduce):
        raise ValueError(f"use() takes a function of comm and tensor, got {all_reduce!r:.60}")
    _learners = all_reduce


def all_reduce(comm: Comm, tensor: Tensor, op: str = "sum") -> Tensor:
    """All-reduce ``tensor`` in place with what ``use`` has chosen; returned."""
    if tensor.layout != torch.strided:
        return collectives.sparse_all_reduce(comm, tensor, op)
    if _learners is None or op not in ("sum", "mean"):
        return fast_ring_all_reduce(comm, tensor, op)
    collectives.Reduction.of(op, tensor)
    name = getattr(_learners, "__name__", "all_reduce")
    with in_place(tensor) as flat, comm.collective(name, tensor, op):
        result = _learners(comm, flat)
        if result is not None and result is not flat:
            check_fits(result, flat, f"what {name} returns")
            flat.copy_(result)
        if op == "mean":
            flat.div_(comm.world_size)
    return tensor


def ddp_hook(comm: Comm, bucket: dist.GradBucket) -> Future[Tensor]:
    """A communication hook: ``model.register_comm_hook(comm, labkit.backend.group.ddp_hook)``.

    Works over any backend of DDP's own: only the gradients go through ``comm``. Returns the
    bucket's mean over the ranks, in a future that is done.
    """
    future: Future[Tensor] = Future()
    future.set_result(all_reduce(comm, bucket.buffer(), "mean"))
    return future


# Of every group of this process: what a group has sent outlives it.
_traffic: list[Traffic] = []


def sent() -> tuple[int, int]:
    """Messages and bytes that this rank's "labkit" groups have sent so far, counted."""
    return sum(one.messages for one in _traffic), sum(one.num_bytes for one in _traffic)


_groups: weakref.WeakSet["LabkitGroup"] = weakref.WeakSet()
# A forked child is no rank, and its end is not the rank's.
os.register_at_fork(after_in_child=_groups.clear)


@atexit.register
def _abandon_groups() -> None:
    # A thread that is inside PyTorch when the interpreter goes would abort the process.
    for group in list(_groups):
        group.abandon()


class LabkitGroup(dist.ProcessGroup):
    """A process group whose collectives are ``labkit.collectives``, for CPU tensors.

    Every method takes the lists that PyTorch passes and returns a ``Task``.

    Raises (from the method): ValueError for what is not served. (From ``wait``): MismatchError
    when the ranks call different collectives, PeerLostError when a rank has ended, TimeoutError
    when what is under way takes longer than ``timeout``.
    """

    # ``split_group`` asks the backend of a group, which is the group itself.
    supports_splitting = True
    supports_coalescing = False

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        try:
            super().__init__(store, rank, size)
        except TypeError:
            # torch 2.11 lets no subclass have a store.
            super().__init__(rank, size)
        self._group_name = self._group_desc = ""
        self._store, self._timeout = store, timeout
        self._comms = {
            part: _comm(part, store, rank, size, timeout) for part in ("collectives", "pairs")
        }
        self._lines: dict[tuple[str, int], Line] = {}
        self._mailbox = Mailbox(rank, size, partial(self._line, "pairs"), timeout.total_seconds())
        self._starting = threading.Lock()
        _groups.add(self)

    def getBackendName(self) -> str:
        return "labkit"

    def name(self) -> str:
        return "labkit"

    # A ProcessGroup of PyTorch's own gets these from the backends that it holds.

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    @property
    def group_name(self) -> str:
        return self._group_name

    def _set_group_desc(self, description: str) -> None:
        self._group_desc = description

    @property
    def group_desc(self) -> str:
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [_CPU]

    def get_group_store(self) -> dist.Store:
        return self._store

    def _get_backend(self, device: torch.device) -> "LabkitGroup":
        if torch.device(device).type != "cpu":
            raise RuntimeError(f'the "labkit" backend is for CPU tensors, not for {device}')
        return self

    get_backend = _get_backend

    def set_timeout(self, timeout: timedelta) -> None:
        """The longest wait from here on, also for what is under way."""
        self._timeout = timeout
        self._mailbox.timeout_s = timeout.total_seconds()
        for line in self._lines.values():
            line.timeout_s = timeout.total_seconds()
        for comm in self._comms.values():
            comm.set_timeout(timeout.total_seconds())

    def split_group(
        self, ranks, timeout=None, opts=None, group_name=None, group_desc=None, device_types=None
    ) -> "LabkitGroup | None":
        """A group of some of these ranks, in the order given; None on the others."""
        if self.rank() not in ranks:
            return None
        store = dist.PrefixStore(f"labkit/split/{group_name}", self._store)
        timeout = timeout or self._timeout
        group = LabkitGroup(store, ranks.index(self.rank()), len(ranks), timeout)
        group._set_group_name(group_name or "")
        group._set_group_desc(group_desc or "")
        return group

    def _together(
        self,
        name: str,
        operation: Callable[[Comm], object],
        inputs: list[Tensor],
        result: list[Tensor],
        opts=None,
    ) -> Task:
        """Queue a collective, or carry it out at once when PyTorch is going to wait for it."""
        is_waited_for = not getattr(opts, "asyncOp", True)
        return self._line("collectives").add(name, operation, inputs, result, is_waited_for)

    def _line(self, part: str, *way) -> Line:
        if not self._comms:
            raise ValueError("this process group was destroyed: make another with new_group")
        with self._starting:
            if (part, *way) not in self._lines:
                name = "-".join(map(str, ("labkit", part, *way)))
                timeout_s = self._timeout.total_seconds()
                self._lines[part, *way] = Line(name, self._comms[part], timeout_s)
            return self._lines[part, *way]

    def allreduce(self, tensors, opts=None):
        (tensor,), op = tensors, reduction_of(opts)
        name = "all_reduce" if tensor.layout == torch.strided else "sparse_all_reduce"
        return self._together(
            name, lambda comm: all_reduce(comm, tensor, op), [tensor], [tensor], opts
        )

    def allreduce_coalesced(self, tensors, opts=None):
        op = reduction_of(opts)
        return self._together(
            "all_reduce",
            lambda comm: [all_reduce(comm, tensor, op) for tensor in tensors],
            tensors,
            tensors,
            opts,
        )

    def broadcast(self, tensors, opts):
        (tensor,), root = tensors, opts.rootRank
        return self._together(
            "broadcast",
            lambda comm: collectives.broadcast(comm, tensor, root),
            [tensor],
            [tensor],
            opts,
        )

    def reduce(self, tensors, opts):
        (tensor,), root, op = tensors, opts.rootRank, reduction_of(opts)
        return self._together(
            "reduce",
            lambda comm: collectives.reduce(comm, tensor, root, op),
            [tensor],
            [tensor],
            opts,
        )

    def allgather(self, output_tensors, input_tensors, opts=None):
        (outputs,), (tensor,) = output_tensors, input_tensors
        check_outputs(outputs, tensor, self.size())
        return self._gather_all([(outputs, tensor)], outputs, opts)

    def allgather_coalesced(self, output_lists, tensors, opts=None):
        # output_lists[rank][i] takes what that rank has in tensors[i].
        pairs = [([of[i] for of in output_lists], tensor) for i, tensor in enumerate(tensors)]
        for outputs, tensor in pairs:
            check_outputs(outputs, tensor, self.size())
        return self._gather_all(pairs, [o for outputs in output_lists for o in outputs], opts)

    def all_gather_single(self, output, tensor, opts=None):
        outputs = equal_parts(output, self.size(), tensor)
        return self._gather_all([(outputs, tensor)], [output], opts)

    def all_gather_single_coalesced(self, outputs, tensors, opts=None):
        pairs = [(equal_parts(o, self.size(), t), t) for o, t in zip(outputs, tensors)]
        return self._gather_all(pairs, outputs, opts)

    def _gather_all(self, pairs, result: list[Tensor], opts) -> Task:
        """All-gather each tensor of ``pairs`` into the P outputs beside it."""
        return self._together(
            "all_gather",
            lambda comm: [copy_all(o, collectives.all_gather(comm, t)) for o, t in pairs],
            [tensor for _, tensor in pairs],
            result,
            opts,
        )

    def gather(self, output_tensors, input_tensors, opts):
        outputs, (tensor,) = [], input_tensors
        if self.rank() == opts.rootRank:
            (outputs,) = output_tensors
            check_outputs(outputs, tensor, self.size())
        return self._gather(outputs, tensor, outputs, opts)

    def gather_single(self, output, tensor, opts):
        here = self.rank() == opts.rootRank
        outputs = equal_parts(output, self.size(), tensor) if here else []
        return self._gather(outputs, tensor, [output] if here else [], opts)

    def _gather(self, outputs: list[Tensor], tensor: Tensor, result: list[Tensor], opts) -> Task:
        root = opts.rootRank
        return self._together(
            "gather",
            lambda comm: copy_all(outputs, collectives.gather(comm, tensor, root) or []),
            [tensor],
            result,
            opts,
        )

    def scatter(self, output_tensors, input_tensors, opts):
        (tensor,), root = output_tensors, opts.rootRank
        inputs = input_tensors[0] if self.rank() == root else None
        return self._together(
            "scatter",
            lambda comm: collectives.scatter(comm, inputs, tensor, root),
            inputs or [],
            [tensor],
            opts,
        )

    def reduce_scatter(self, output_tensors, input_tensors, opts):
        (output,), (inputs,) = output_tensors, input_tensors
        return self._scatter_sums([(output, inputs)], inputs, [output], opts)

    def reduce_scatter_single(self, output, tensor, opts):
        pairs = [(output, equal_parts(tensor, self.size(), output))]
        return self._scatter_sums(pairs, [tensor], [output], opts)

    def reduce_scatter_single_coalesced(self, outputs, tensors, opts):
        pairs = [(o, equal_parts(t, self.size(), o)) for o, t in zip(outputs, tensors)]
        return self._scatter_sums(pairs, tensors, outputs, opts)

    def _scatter_sums(self, pairs, inputs: list[Tensor], result: list[Tensor], opts) -> Task:
        """Reduce-scatter: each output of ``pairs`` gets its share of the P tensors beside it."""
        op = reduction_of(opts)
        for output, tensors in pairs:
            # A copy would convert and broadcast.
            check_fits(tensors[self.rank()], output, "this rank's share of the inputs")
        return self._together(
            "reduce_scatter",
            lambda comm: [o.copy_(collectives.reduce_scatter(comm, t, op)) for o, t in pairs],
            inputs,
            result,
            opts,
        )

    def alltoall(self, output_tensors, input_tensors, opts=None):
        return self._together(
            "all_to_all",
            lambda comm: collectives.all_to_all(comm, input_tensors, output_tensors),
            input_tensors,
            output_tensors,
            opts,
        )

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts=None):
        outputs = split_parts(output, self.size(), output_splits)
        inputs = split_parts(tensor, self.size(), input_splits)
        return self._together(
            "all_to_all",
            lambda comm: collectives.all_to_all(comm, inputs, outputs),
            [tensor],
            [output],
            opts,
        )

    def barrier(self, opts=None):
        return self._together("barrier", lambda comm: comm.barrier(), [], [], opts)

    def monitored_barrier(self, timeout=None, wait_all_ranks=False):
        """A barrier through the store, which names the ranks that do not come."""
        monitored_barrier(
            self._store, self.rank(), self.size(), timeout or self._timeout, wait_all_ranks
        )

    def send(self, tensors, dst, tag):
        (tensor,) = tensors
        return self._mailbox.send(tensor, dst, tag)

    def recv(self, tensors, src, tag):
        (tensor,) = tensors
        return self._mailbox.recv(tensor, src, tag)

    def recv_anysource(self, tensors, tag):
        (tensor,) = tensors
        return self._mailbox.recv(tensor, None, tag)

    # The names of torch 2.11.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single

    def shutdown(self) -> None:
        """End the threads, after what is queued; PyTorch calls it when the group is destroyed.

        Warns of an operation that takes longer than the group's timeout, and leaves it behind.
        """
        self._end(None)

    def abandon(self) -> None:
        """The program ends: drop what is queued, and wait for nobody."""
        for comm in self._comms.values():
            comm.abandon()
        self._end(_LAST_PATIENCE_S)

    def _end(self, patience_s: float | None) -> None:
        lines, self._lines = self._lines, {}
        comms, self._comms = self._comms, {}
        if patience_s is None:
            self._mailbox.end()
        left_behind = []
        # Those that read go last: one that waits for any source has begun to read from all.
        for way in sorted(lines, key=lambda way: "from" in way):
            if "from" in way:
                comms["pairs"].abandon()
            if not lines[way].end(patience_s):
                left_behind.append(lines[way].why_late())
        for comm in comms.values():
            comm.leave()
        if left_behind and patience_s is None:
            # An error here would keep PyTorch from forgetting the group.
            warnings.warn(f"the group has ended, but not {left_behind[0]}", stacklevel=3)


def _refuse(name: str):
    def refuse(self, *args, **kwargs):
        raise refusal(name)

    return refuse


for _name in REFUSED:
    if hasattr(dist.ProcessGroup, _name):
        setattr(LabkitGroup, _name, _refuse(_name))


def _keep_compilers_out(*classes: type) -> None:
    """Let torch.compile run these methods, and what they call, as they are."""
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return
    as_it_is = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for method in (method for cls in classes for method in vars(cls).values()):
        if inspect.isfunction(method):
            frames.set_code_exec_strategy(method.__code__, as_it_is)


_keep_compilers_out(LabkitGroup, Task)


def _comm(part: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Comm:
    """A Comm for one kind of traffic; channels are first in, first out, so each has its own."""
    store = dist.PrefixStore(f"labkit/{part}", store)
    arena = meet(store, rank, size)
    if arena is None:
        stay_on_loopback()
        group = dist.ProcessGroupGloo(store, rank, size, timeout)
        transport = TorchTransport("gloo", _CPU, group)
    else:
        transport = SharedTransport(arena, rank, timeout.total_seconds())
    _traffic.append(transport.sent)
    board = arena and arena.board
    return Comm(rank, size, _CPU, transport, board, keep_spans=_KEPT_SPANS)
