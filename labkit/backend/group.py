"""The ``torch.distributed`` backend "labkit": PyTorch's own training on our collectives.

    import labkit
    torch.distributed.init_process_group("labkit")      # or new_group(backend="labkit")
    model = DistributedDataParallel(model)

Ranks of one machine meet in shared memory (``labkit.comm.shared_memory``); on several machines the
same collectives run over gloo's point-to-point. ``labkit.backend.use(my_ring)`` puts another
all-reduce below DDP (``labkit.backend.chosen``). What is not supported is in
``labkit.backend.arguments.REFUSED``, with the reason.
"""

import contextlib
import inspect
import time
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit import collectives
from labkit.backend import arguments
from labkit.backend.chosen import all_reduce
from labkit.backend.mailbox import Mailbox
from labkit.backend.queues import Queues
from labkit.collectives.common import check_fits
from labkit.comm.comm import Comm
from labkit.comm.work import Work

# PyTorch's flight recorder listens to hooks that a group in Python never calls, and would fail.
getattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set()).add("labkit")

# Untyped: the overloads of the C++ class in PyTorch's stubs do not apply to a group in Python.
ProcessGroup: Any = dist.ProcessGroup

Tensors = list[Tensor]


class LabkitGroup(ProcessGroup):
    """A process group whose collectives are ``labkit.collectives``, for CPU tensors.

    It implements the methods of PyTorch's ``ProcessGroup``, which determines their number, their
    names and the lists that they take. Each checks its arguments, queues the collective
    (``labkit.backend.queues``), and returns its ``Work``.

    Raises (from the method): ValueError for what is not supported. (From ``wait`` of the ``Work``
    returned): MismatchError when the ranks call different collectives, PeerLostError when a rank
    has ended, TimeoutError when an operation takes longer than ``timeout``.
    """

    # ``dist.split_group`` asks the group's backend for these; here that is the group itself.
    supports_splitting = True
    supports_coalescing = False

    # PyTorch's own ProcessGroup gets these from its backends.
    group_name = group_desc = ""
    _device_types = (torch.device("cpu"),)

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        ranks: Sequence[int] | None = None,
    ):
        try:
            super().__init__(store, rank, size)
        except TypeError:
            # In torch 2.11 a subclass cannot have a store.
            super().__init__(rank, size)
        self._store, self._timeout = store, timeout
        # As they are numbered in the run.
        self._ranks = ranks or range(size)
        self._queues = Queues(store, rank, size, timeout, self._ranks)
        self._mailbox = Mailbox(rank, size, self._queues.edge, timeout.total_seconds())

    def getBackendName(self) -> str:
        return "labkit"

    name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self.group_name = name

    def _set_group_desc(self, description: str) -> None:
        self.group_desc = description

    def get_group_store(self) -> dist.Store:
        return self._store

    def _get_backend(self, device: torch.device) -> "LabkitGroup":
        if torch.device(device).type != "cpu":
            raise RuntimeError(f'the "labkit" backend is for CPU tensors, not for {device}')
        return self

    get_backend = _get_backend

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait from now on, also for operations under way."""
        self._timeout = timeout
        self._mailbox.timeout_s = timeout.total_seconds()
        self._queues.set_timeout(timeout.total_seconds())

    def split_group(
        self,
        ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> "LabkitGroup | None":
        """Make a group of ``ranks``, in that order; returns None on the ranks left out."""
        if self.rank() not in ranks:
            return None
        store = dist.PrefixStore(f"labkit/split/{group_name}", self._store)
        timeout = timeout or self._timeout
        in_run = [self._ranks[rank] for rank in ranks]
        group = LabkitGroup(store, ranks.index(self.rank()), len(ranks), timeout, in_run)
        group.group_name, group.group_desc = group_name or "", group_desc or ""
        return group

    def _queue(
        self,
        name: str,
        operation: Callable[[Comm], object],
        inputs: Tensors,
        opts: Any,
        result: Tensors | None = None,
    ) -> Work:
        """Queue a collective, or carry it out at once when PyTorch is going to wait for it.

        ``result`` lists the tensors that hold the result; None means ``inputs``.
        """
        is_waited_for = not getattr(opts, "asyncOp", True)
        result = inputs if result is None else result
        return self._queues.collectives().add(name, operation, inputs, result, is_waited_for)

    def allreduce(self, tensors: Tensors, opts: Any = None) -> Work:
        op = arguments.reduction_of(opts)
        is_dense = all(tensor.layout == torch.strided for tensor in tensors)
        name = "all_reduce" if is_dense else "sparse_all_reduce"
        return self._queue(
            name, lambda comm: [all_reduce(comm, t, op) for t in tensors], tensors, opts
        )

    allreduce_coalesced = allreduce

    def broadcast(self, tensors: Tensors, opts: Any) -> Work:
        (tensor,) = tensors
        operation = partial(collectives.broadcast, tensor=tensor, root=opts.rootRank)
        return self._queue("broadcast", operation, tensors, opts)

    def reduce(self, tensors: Tensors, opts: Any) -> Work:
        (tensor,), op = tensors, arguments.reduction_of(opts)
        operation = partial(collectives.reduce, tensor=tensor, root=opts.rootRank, op=op)
        return self._queue("reduce", operation, tensors, opts)

    def allgather(self, outputs: list[Tensors], tensors: Tensors, opts: Any = None) -> Work:
        arguments.check_outputs(outputs[0], tensors[0], self.size())
        return self._gather_all(outputs, tensors, opts, outputs[0])

    def allgather_coalesced(
        self, output_lists: list[Tensors], tensors: Tensors, opts: Any = None
    ) -> Work:
        # output_lists[rank][i] takes what that rank has in tensors[i].
        outputs = [[of[i] for of in output_lists] for i in range(len(tensors))]
        for of_all_ranks, tensor in zip(outputs, tensors):
            arguments.check_outputs(of_all_ranks, tensor, self.size())
        return self._gather_all(outputs, tensors, opts, [o for of in output_lists for o in of])

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Work:
        return self.all_gather_single_coalesced([output], [tensor], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, tensors: Tensors, opts: Any = None
    ) -> Work:
        parts = [arguments.equal_parts(o, self.size(), t) for o, t in zip(outputs, tensors)]
        return self._gather_all(parts, tensors, opts, outputs)

    def _gather_all(
        self, outputs: list[Tensors], tensors: Tensors, opts: Any, result: Tensors
    ) -> Work:
        """All-gather each tensor into its P outputs."""

        def operation(comm: Comm) -> None:
            for targets, tensor in zip(outputs, tensors):
                arguments.copy_all(targets, collectives.all_gather(comm, tensor))

        return self._queue("all_gather", operation, tensors, opts, result)

    def gather(self, output_tensors: list[Tensors], tensors: Tensors, opts: Any) -> Work:
        outputs: Tensors = []
        if self.rank() == opts.rootRank:
            (outputs,) = output_tensors
            arguments.check_outputs(outputs, tensors[0], self.size())
        return self._gather(outputs, tensors[0], opts, outputs)

    def gather_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Work:
        is_root = self.rank() == opts.rootRank
        outputs = arguments.equal_parts(output, self.size(), tensor) if is_root else []
        return self._gather(outputs, tensor, opts, [output] if is_root else [])

    def _gather(self, outputs: Tensors, tensor: Tensor, opts: Any, result: Tensors) -> Work:
        root = opts.rootRank

        def operation(comm: Comm) -> None:
            arguments.copy_all(outputs, collectives.gather(comm, tensor, root) or [])

        return self._queue("gather", operation, [tensor], opts, result)

    def scatter(self, outputs: Tensors, input_tensors: list[Tensors], opts: Any) -> Work:
        (output,), root = outputs, opts.rootRank
        inputs = input_tensors[0] if self.rank() == root else []
        operation = partial(collectives.scatter, tensors=inputs, out=output, root=root)
        return self._queue("scatter", operation, inputs, opts, outputs)

    def reduce_scatter(self, outputs: Tensors, input_tensors: list[Tensors], opts: Any) -> Work:
        return self._scatter_sums(outputs, input_tensors, opts, input_tensors[0])

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Any) -> Work:
        return self.reduce_scatter_single_coalesced([output], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, tensors: Tensors, opts: Any
    ) -> Work:
        parts = [arguments.equal_parts(t, self.size(), o) for o, t in zip(outputs, tensors)]
        return self._scatter_sums(outputs, parts, opts, tensors)

    def _scatter_sums(
        self, outputs: Tensors, parts: list[Tensors], opts: Any, inputs: Tensors
    ) -> Work:
        """Reduce-scatter: each output gets this rank's share of its P parts, summed."""
        op = arguments.reduction_of(opts)
        for output, shares in zip(outputs, parts):
            # A copy would convert and broadcast.
            check_fits(shares[self.rank()], output, "this rank's share of the inputs")

        def operation(comm: Comm) -> None:
            for output, shares in zip(outputs, parts):
                output.copy_(collectives.reduce_scatter(comm, shares, op))

        return self._queue("reduce_scatter", operation, inputs, opts, outputs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        operation = partial(collectives.all_to_all, tensors=inputs, out=outputs)
        return self._queue("all_to_all", operation, inputs, opts, outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> Work:
        outputs = arguments.split_parts(output, self.size(), output_splits)
        inputs = arguments.split_parts(tensor, self.size(), input_splits)
        operation = partial(collectives.all_to_all, tensors=inputs, out=outputs)
        return self._queue("all_to_all", operation, [tensor], opts, [output])

    def barrier(self, opts: Any = None) -> Work:
        return self._queue("barrier", Comm.barrier, [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all ranks have come; the error names the first that has not, or all.

        It needs only the store. So it works, and names the right rank, while a rank is stuck in a
        collective. Raises RuntimeError, on every rank that came.
        """
        store, rank, timeout = self._store, self.rank(), timeout or self._timeout
        place = f"labkit/monitored/{store.add(f'labkit/monitored/{rank}', 1)}"

        def comes(key: str, patience: timedelta) -> bool:
            with contextlib.suppress(RuntimeError):
                store.wait([f"{place}/{key}"], patience)
                return True
            return False

        if rank:
            store.set(f"{place}/{rank}", "came")
            # Rank 0 may come last, and then wait for a whole timeout for the missing ranks.
            if not comes("verdict", 2 * timeout):
                raise RuntimeError(f"rank 0 did not come to the monitored barrier of rank {rank}")
            missing = store.get(f"{place}/verdict").decode().strip()
        else:
            until_s, absent = time.monotonic() + timeout.total_seconds(), list[str]()
            for other in range(1, self.size()):
                left_s = max(0.001, until_s - time.monotonic())
                if not comes(str(other), timedelta(seconds=left_s)):
                    absent.append(str(other))
                    if not wait_all_ranks:
                        break
            missing = f"rank{'s' * (len(absent) > 1)} {', '.join(absent)}" if absent else ""
            store.set(f"{place}/verdict", missing or " ")
        if missing:
            raise RuntimeError(
                f"{missing} did not come to the monitored barrier in {timeout.total_seconds():g} s"
            )

    def send(self, tensors: Tensors, dst: int, tag: int) -> Work:
        (tensor,) = tensors
        return self._mailbox.send(tensor, dst, tag)

    def recv(self, tensors: Tensors, src: int | None, tag: int) -> Work:
        (tensor,) = tensors
        return self._mailbox.recv(tensor, src, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self.recv(tensors, None, tag)

    # Names of the same methods in torch 2.11.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single
    gather_into_tensor = gather_single

    def shutdown(self) -> None:
        """End the threads after all queued operations; PyTorch calls this to destroy the group.

        An operation that takes longer than the group's timeout is left running, with a warning.
        """
        self._mailbox.end()
        if left_behind := self._queues.end():
            # After an error here, PyTorch would keep the group registered.
            warnings.warn(f"the process group has ended, but {left_behind}", stacklevel=2)


def _refuse(name: str) -> Callable[..., None]:
    def refuse(self: LabkitGroup, *args: Any, **kwargs: Any) -> None:
        raise arguments.refusal(name)

    return refuse


for _name in arguments.REFUSED:
    if hasattr(dist.ProcessGroup, _name):
        setattr(LabkitGroup, _name, _refuse(_name))


def _keep_compilers_out(*classes: type) -> None:
    """Make torch.compile leave these methods, and the functions they call, uncompiled."""
    frames = torch._C._dynamo.eval_frame
    if not hasattr(frames, "set_code_exec_strategy"):
        return
    as_it_is = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    for method in (method for cls in classes for method in vars(cls).values()):
        if inspect.isfunction(method):
            frames.set_code_exec_strategy(method.__code__, as_it_is)


_keep_compilers_out(LabkitGroup, Work)
