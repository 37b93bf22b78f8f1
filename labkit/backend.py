"""The ``torch.distributed`` backend "labkit": PyTorch's own training on our collectives.

    import labkit
    torch.distributed.init_process_group("labkit")      # or new_group(backend="labkit")
    model = DistributedDataParallel(model)

Ranks of one machine meet in shared memory (``labkit.shared_memory``); on several machines the same
collectives run over gloo's point-to-point. ``use(my_ring)`` puts another all-reduce below DDP.

PyTorch calls a method of ``ProcessGroup`` and gets a ``Work``, the receipt of an operation under
way. One thread a group carries out the collectives in the order of the calls, as the learner's
function on ``Comm``; sends and receives have a thread an edge, since they may wait for each other.
"""

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from labkit import collectives
from labkit.collectives import fast_ring_all_reduce
from labkit.collectives.common import check_fits, in_place
from labkit.comm import Comm, describe
from labkit.meeting import meet, stay_on_loopback
from labkit.shared_memory import SharedTransport
from labkit.tasks import Line, Task
from labkit.transports import TorchTransport, Traffic
from labkit.units import format_count

AllReduce = Callable[[Comm, Tensor], Tensor | None]

_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
}
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
    """A communication hook: ``model.register_comm_hook(comm, labkit.backend.ddp_hook)``.

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
    when the ranks call different collectives, PeerLostError when a rank has ended.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta):
        try:
            super().__init__(store, rank, size)
        except TypeError:
            # torch 2.11 lets no subclass have a store.
            super().__init__(rank, size)
        self._group_name = ""
        self._comms = {
            part: _comm(part, store, rank, size, timeout) for part in ("collectives", "pairs")
        }
        self._lines: dict[tuple[str, int], Line] = {}
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

    def _get_backend(self, device: torch.device) -> "LabkitGroup":
        if torch.device(device).type != "cpu":
            raise RuntimeError(f'the "labkit" backend is for CPU tensors, not for {device}')
        return self

    def _together(self, operation: Callable[[Comm], object], result: list[Tensor], opts) -> Task:
        """Queue a collective, or carry it out at once when PyTorch is going to wait for it."""
        is_waited_for = not getattr(opts, "asyncOp", True)
        return self._line("collectives").add(operation, result, is_waited_for)

    def _line(self, part: str, *way) -> Line:
        if not self._comms:
            raise ValueError("this process group was destroyed: make another with new_group")
        with self._starting:
            if (part, *way) not in self._lines:
                name = "-".join(map(str, ("labkit", part, *way)))
                self._lines[part, *way] = Line(name, self._comms[part])
            return self._lines[part, *way]

    def allreduce(self, tensors, opts=None):
        (tensor,), op = tensors, _op(opts)
        return self._together(lambda comm: all_reduce(comm, tensor, op), [tensor], opts)

    def allreduce_coalesced(self, tensors, opts):
        op = _op(opts)
        each = [lambda comm, tensor=tensor: all_reduce(comm, tensor, op) for tensor in tensors]
        return self._together(
            lambda comm: [reduce_one(comm) for reduce_one in each], tensors, opts
        )

    def broadcast(self, tensors, opts):
        (tensor,), root = tensors, opts.rootRank
        return self._together(
            lambda comm: collectives.broadcast(comm, tensor, root), [tensor], opts
        )

    def reduce(self, tensors, opts):
        (tensor,), root, op = tensors, opts.rootRank, _op(opts)
        return self._together(
            lambda comm: collectives.reduce(comm, tensor, root, op), [tensor], opts
        )

    def allgather(self, output_tensors, input_tensors, opts=None):
        (outputs,), (tensor,) = output_tensors, input_tensors
        _check_outputs(outputs, tensor, self.size())
        return self._together(
            lambda comm: _copy_all(outputs, collectives.all_gather(comm, tensor)), outputs, opts
        )

    def all_gather_single(self, output, tensor, opts=None):
        outputs = _parts(output, self.size(), tensor)
        return self._together(
            lambda comm: _copy_all(outputs, collectives.all_gather(comm, tensor)), [output], opts
        )

    def all_gather_single_coalesced(self, outputs, tensors, opts=None):
        pairs = [(_parts(o, self.size(), t), t) for o, t in zip(outputs, tensors)]
        return self._together(
            lambda comm: [_copy_all(o, collectives.all_gather(comm, t)) for o, t in pairs],
            outputs,
            opts,
        )

    def gather(self, output_tensors, input_tensors, opts):
        outputs, (tensor,), root = [], input_tensors, opts.rootRank
        if self.rank() == root:
            (outputs,) = output_tensors
            _check_outputs(outputs, tensor, self.size())
        return self._together(
            lambda comm: _copy_all(outputs, collectives.gather(comm, tensor, root) or []),
            outputs,
            opts,
        )

    def scatter(self, output_tensors, input_tensors, opts):
        (tensor,), root = output_tensors, opts.rootRank
        inputs = input_tensors[0] if self.rank() == root else None
        return self._together(
            lambda comm: collectives.scatter(comm, inputs, tensor, root), [tensor], opts
        )

    def reduce_scatter(self, output_tensors, input_tensors, opts):
        (output,), (inputs,), op = output_tensors, input_tensors, _op(opts)
        return self._together(
            lambda comm: output.copy_(collectives.reduce_scatter(comm, inputs, op)), [output], opts
        )

    def reduce_scatter_single(self, output, tensor, opts):
        inputs, op = _parts(tensor, self.size(), output), _op(opts)
        return self._together(
            lambda comm: output.copy_(collectives.reduce_scatter(comm, inputs, op)), [output], opts
        )

    def reduce_scatter_single_coalesced(self, outputs, tensors, opts):
        op = _op(opts)
        pairs = [(o, _parts(t, self.size(), o)) for o, t in zip(outputs, tensors)]
        return self._together(
            lambda comm: [o.copy_(collectives.reduce_scatter(comm, t, op)) for o, t in pairs],
            outputs,
            opts,
        )

    def alltoall(self, output_tensors, input_tensors, opts=None):
        return self._together(
            lambda comm: collectives.all_to_all(comm, input_tensors, output_tensors),
            output_tensors,
            opts,
        )

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts=None):
        outputs = _split(output, self.size(), output_splits)
        inputs = _split(tensor, self.size(), input_splits)
        return self._together(
            lambda comm: collectives.all_to_all(comm, inputs, outputs), [output], opts
        )

    def barrier(self, opts=None):
        return self._together(lambda comm: comm.barrier(), [], opts)

    def send(self, tensors, dst, tag):
        (tensor,) = tensors
        _check_tag(tag)
        return self._line("pairs", "to", dst).add(lambda comm: comm.send(tensor, dst), [tensor])

    def recv(self, tensors, src, tag):
        (tensor,) = tensors
        _check_tag(tag)
        return self._line("pairs", "from", src).add(lambda comm: comm.recv(tensor, src), [tensor])

    # The names of torch 2.11.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def shutdown(self) -> None:
        """End the threads, after what is queued; PyTorch calls it when the group is destroyed."""
        self._end(None)

    def abandon(self) -> None:
        """The program ends: drop what is queued, and wait for nobody."""
        for comm in self._comms.values():
            comm.abandon()
        self._end(_LAST_PATIENCE_S)

    def _end(self, patience_s: float | None) -> None:
        lines, self._lines = self._lines, {}
        for line in lines.values():
            line.end(patience_s)
        comms, self._comms = self._comms, {}
        for comm in comms.values():
            comm.leave()


def _not_served(name: str, instead: str):
    def refuse(self, *args, **kwargs):
        raise ValueError(f'the "labkit" backend does not serve {name}: {instead}')

    return refuse


for _name, _instead in {
    "recv_anysource": "give recv a src",
    "allgather_coalesced": "call all_gather for each tensor",
    "gather_single": "use gather with a list",
}.items():
    setattr(LabkitGroup, _name, _not_served(_name, _instead))


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


def _op(opts) -> str:
    if opts is None:
        return "sum"
    for known, name in _OPS.items():
        if opts.reduceOp == known:
            return name
    names = ("PRODUCT", "BAND", "BOR", "BXOR", "PREMUL_SUM")
    name = next((n for n in names if opts.reduceOp == getattr(dist.ReduceOp, n, None)), "this op")
    raise ValueError(f'the "labkit" backend does not serve {name}: use SUM, AVG, MAX or MIN')


def _check_tag(tag: int) -> None:
    if tag != 0:
        raise ValueError(f'the "labkit" backend does not serve tags, got {tag}: leave the tag out')


def _parts(whole: Tensor, size: int, like: Tensor) -> list[Tensor]:
    """P views of ``whole``, each of the shape of ``like``."""
    if whole.numel() != size * like.numel() or whole.dtype != like.dtype:
        raise ValueError(
            f"{size} parts of {describe(like)} do not make {describe(whole)}: "
            f"{size} x {like.numel()} elements of one dtype are needed"
        )
    return list(whole.view(size, *like.shape).unbind())


def _split(whole: Tensor, size: int, splits: list[int]) -> list[Tensor]:
    """P views of ``whole``: of the given lengths, or all of one."""
    length, rest = divmod(len(whole), size)
    if not splits and rest:
        raise ValueError(
            f"{describe(whole)} cannot be cut into {size} equal parts: give the split sizes"
        )
    return list(whole.split(splits or [length] * size))


def _check_outputs(outputs: list[Tensor], tensor: Tensor, size: int) -> None:
    if len(outputs) != size:
        given = format_count(len(outputs), "output tensor")
        raise ValueError(f"{given} for {format_count(size, 'rank')}: give one for each rank")
    for output in outputs:
        check_fits(tensor, output, "what every rank sends")


def _copy_all(outputs: list[Tensor], values: list[Tensor]) -> None:
    for output, value in zip(outputs, values):
        output.copy_(value)
