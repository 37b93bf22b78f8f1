"""Collectives that ranks may submit in different orders: they agree by name on what runs next.

A thread of each rank does this in the background, in cycles. Every rank sends to rank 0 what is
new; the ``Coordinator`` there sends back the names that all ranks have submitted, and all run them
in that order. Neighboring all-reduces are fused, as a ring costs 2 (P - 1) latencies at any size.

Messages of a cycle, besides those of the collectives: 2 from each other rank to rank 0 and 2 back,
a length and as many bytes of JSON. A rank that has submitted nothing takes no part: then nothing
can be ready, and the others sleep until it comes.
"""

import json
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from labkit.collectives import all_gather, all_to_all, broadcast, fast_all_reduce
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.source_lines import caller_location, credit_to
from labkit.engine.comm.transport import describe
from labkit.engine.errors import MismatchError
from labkit.engine.runtime.torchrun import Opened, open_for
from labkit.horovod.coordinator import Coordinator

FUSION_BYTES = 64 * 2**20
# How long a cycle waits for more to fuse, unless the program waits for what is new.
CYCLE_S = 1e-3
# How long the end waits for what is under way.
_DRAIN_S = 2.0


class HorovodInternalError(MismatchError, RuntimeError):
    """Ranks want different things under one name, or wait for each other; says which and what."""


@dataclass(eq=False)
class Handle:
    """One submitted collective; the caller waits here for its result.

    Attributes:
        name: by which the ranks agree.
        kind: ``allreduce``, ``allgather`` or ``broadcast``.
        option: the operation of an all-reduce, the root of a broadcast.
        tensor: this rank's values; an all-gather leaves them, the others work in place.
        location: the line that has submitted it.
    """

    engine: "Engine"
    name: str
    kind: str
    option: str
    tensor: Tensor
    location: str
    future: Future[Tensor] = field(default_factory=Future)
    is_awaited: bool = False

    def wait(self) -> Tensor:
        """Return the result; HorovodInternalError or PeerLostError if there is none."""
        with self.engine.changed:
            self.is_awaited = True
            self.engine.changed.notify_all()
        return self.future.result()


class Engine(threading.Thread):
    """The background thread of one rank, from ``init`` to ``shutdown``.

    ``opened`` has the ``comm`` of these ranks, on the CPU, for this thread alone.
    """

    def __init__(self, opened: Opened):
        super().__init__(name="labkit-horovod", daemon=True)
        self.opened = opened
        self.comm = opened.comm
        self.changed = threading.Condition()
        self._num_unnamed = Counter[str]()
        self._coordinator = Coordinator(self.comm.world_size)  # asked on rank 0 alone
        # What is under way, by name, and the descriptions of what rank 0 does not know yet.
        self._handles: dict[str, Handle] = {}
        self._new: dict[str, str] = {}
        self._error: BaseException | None = None
        self._is_ending = False
        self.start()

    def submit(self, kind: str, name: str | None, tensor: Tensor, option: str = "") -> Handle:
        """Submit a collective (see ``Handle``), which begins once all ranks have submitted it.

        Without a name, what belongs together is the n-th of its kind on all ranks. ValueError for
        a name that is under way already, PeerLostError if a rank has ended.
        """
        location = caller_location()
        described = tensor
        if kind == "allgather":
            described = tensor.new_empty(tensor.shape[1:])  # ranks may differ in their rows
        with self.changed:
            if self._error is not None:
                raise self._error
            if name is None:
                self._num_unnamed[kind] += 1
                name = f"noname.{self._num_unnamed[kind]}"
            name = f"{kind}.{name}"
            earlier = self._handles.get(name)
            if earlier is not None:
                raise ValueError(
                    f"{name!r} is under way already, from {earlier.location}: wait for that one "
                    "first, or give another name"
                )
            handle = Handle(self, name, kind, option, tensor.detach(), location)
            self._handles[name] = handle
            self._new[name] = f"{kind} {option} {describe(described)}"
            self.changed.notify_all()
        return handle

    def run(self) -> None:
        torch.set_grad_enabled(False)
        try:
            while self._await_work():
                self._run_collectives(self._negotiate())
        except BaseException as error:
            with self.changed:
                self._error = error
            while self._handles:
                _, handle = self._handles.popitem()
                handle.future.set_exception(error)
            self.comm.session.board.give_up(self.comm.rank, f"{type(error).__name__}: {error}")

    def _await_work(self) -> bool:
        """Sleep until the next cycle is due; False when this rank has ended."""
        with self.changed:
            self.changed.wait_for(lambda: self._handles or self._is_ending)
            self.changed.wait_for(lambda: self._new and self._program_waits(), CYCLE_S)
            return bool(self._handles)

    def _program_waits(self) -> bool:
        return any(handle.is_awaited for handle in self._handles.values())

    def _negotiate(self) -> dict[str, str]:
        """Agree with the other ranks on what runs next, see ``Coordinator.decide``."""
        with self.changed:
            credit_to(next(iter(self._handles.values())).location)
            message = {"new": self._new, "waits": self._program_waits()}
            self._new = {}
        if self.comm.rank != 0:
            self._send(message, dst=0)
            return self._recv(src=0)
        other_ranks = range(1, self.comm.world_size)
        errors = self._coordinator.decide([message, *map(self._recv, other_ranks)])
        for rank in other_ranks:
            self._send(errors, rank)
        return errors

    def _send(self, message: Any, dst: int) -> None:
        data = bytearray(json.dumps(message, separators=(",", ":")).encode())
        self.comm.send(torch.tensor(len(data)), dst)
        self.comm.send(torch.frombuffer(data, dtype=torch.uint8), dst)

    def _recv(self, src: int) -> Any:
        num_bytes = int(self.comm.recv(torch.tensor(0), src))
        data = self.comm.recv(torch.empty(num_bytes, dtype=torch.uint8), src)
        return json.loads(bytes(data.numpy()))

    def _run_collectives(self, errors: dict[str, str]) -> None:
        """Run the collectives with these names, and finish those that have an error."""
        agreed = []
        for name, error in errors.items():
            if not error:
                agreed.append(self._handles[name])
            elif name in self._handles:  # a deadlock ends names that this rank has not submitted
                self._handles.pop(name).future.set_exception(HorovodInternalError(error))
        for handles in fuse(agreed, FUSION_BYTES):
            for handle, result in zip(handles, run_collective(self.comm, handles)):
                del self._handles[handle.name]
                handle.future.set_result(result)

    def end(self) -> None:
        """End the thread; what is under way has a moment to finish."""
        with self.changed:
            self._is_ending = True
            self.changed.notify_all()
        self.join(_DRAIN_S)
        if self.is_alive():
            self.comm.transport.abandon()
            self.join(_DRAIN_S)


def fuse(handles: Sequence[Handle], most_bytes: int) -> list[list[Handle]]:
    """Put neighboring all-reduces of one operation and dtype together: ``most_bytes`` at most."""
    groups: list[list[Handle]] = []
    group_key = None
    group_bytes = 0
    for handle in handles:
        key = (handle.kind, handle.option, handle.tensor.dtype)
        group_bytes += handle.tensor.nbytes
        if key == group_key and handle.kind == "allreduce" and group_bytes <= most_bytes:
            groups[-1].append(handle)
        else:
            groups.append([handle])
            group_key = key
            group_bytes = handle.tensor.nbytes
    return groups


def run_collective(comm: Comm, handles: Sequence[Handle]) -> list[Tensor]:
    """Run one collective, or all-reduces that share a buffer, on the CPU; return the results."""
    tensors = [handle.tensor for handle in handles]
    kind = handles[0].kind
    option = handles[0].option
    if kind == "allreduce":
        flat = torch.cat([tensor.cpu().reshape(-1) for tensor in tensors])
        fast_all_reduce(comm, flat, option)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [tensor.copy_(part.view(tensor.shape)) for tensor, part in zip(tensors, parts)]
    values = tensors[0].cpu().contiguous()
    if kind == "broadcast":
        return [tensors[0].copy_(broadcast(comm, values, int(option)))]
    num_rows = all_gather(comm, torch.tensor(len(values)))
    received = [values.new_empty(int(rows), *values.shape[1:]) for rows in num_rows]
    all_to_all(comm, [values] * comm.world_size, received)
    return [torch.cat(received).to(tensors[0].device)]


_engine: Engine | None = None


def init(comm: Comm | None = None) -> None:
    """Join the other ranks, unless this one has. ``comm``: of ``labkit.run``, found by itself."""
    global _engine
    if comm is not None and not isinstance(comm, Comm):
        raise ValueError(
            f"init() takes no list of ranks or communicator of MPI, and got {comm!r}: all ranks "
            "that the launcher started take part"
        )
    if _engine is None:
        _engine = Engine(open_for("horovod", comm, shutdown))


def shutdown() -> None:
    """Leave the other ranks; ``init`` joins them again."""
    global _engine
    ended = _engine
    _engine = None
    if ended is not None and ended.opened.is_mine():
        ended.end()
        ended.opened.close()


def engine() -> Engine:
    """Return the thread that runs everything; its ``comm`` counts what is sent."""
    if _engine is None:
        raise ValueError("labkit.horovod has not been initialized: call hvd.init() first")
    return _engine
