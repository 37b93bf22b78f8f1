"""Collectives that ranks may submit in different orders: they agree by name on what runs next.

A thread of each rank does this in the background, in cycles; one cycle, on each rank that has
submitted something:

1. Take what was submitted since the last cycle. 2. Send that to rank 0, the ``Coordinator``. 3. A
name is ready when all ranks have submitted it. 4. Rank 0 compares what they want; if they differ,
all get an error that says what each has. 5. Rank 0 sends the list to all. 6. All run it;
neighboring all-reduces are fused, as a ring costs 2 (P - 1) latencies at any size.

Messages of a cycle, besides those of the collectives: 2 from each other rank to rank 0 and 2 back,
a length and as many bytes of JSON. A rank that has submitted nothing takes no part: then nothing
can be ready, and the others sleep in step 2 until it comes.
"""

import json
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.collectives import all_gather, all_to_all, broadcast, fast_all_reduce
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.source_lines import caller_location, credit_to
from labkit.engine.errors import MismatchError
from labkit.engine.runtime.torchrun import Opened, open_for
from labkit.horovod.coordinator import Coordinator, Decision, Request

FUSION_BYTES = 64 * 2**20
# How long a tensor waits for others to be fused with, unless the program waits for it.
CYCLE_S = 1e-3
# The pause where all have submitted something, and nothing is ready.
_PAUSE_S = 5e-3
# How long the end waits for what is under way.
_DRAIN_S = 2.0


class HorovodInternalError(MismatchError, RuntimeError):
    """Ranks want different things under one name, or wait for each other; says which and what."""


@dataclass(eq=False)
class Handle:
    """One submitted collective; the caller waits here for its result.

    Attributes:
        kind: ``allreduce``, ``allgather`` or ``broadcast``.
        option: the operation of an all-reduce, the root of a broadcast.
        tensor: this rank's values; an all-gather leaves them, the others work in place.
        location: the line that has submitted it.
    """

    engine: "Engine"
    kind: str
    option: str
    tensor: Tensor
    location: str
    result: Tensor | None = None
    error: BaseException | None = None

    def wait(self) -> Tensor:
        """Return the result; HorovodInternalError or PeerLostError if there is none."""
        with self.engine.changed:
            self.engine.num_waiting += 1
            self.engine.changed.notify_all()
            self.engine.changed.wait_for(lambda: self.result is not None or self.error)
            self.engine.num_waiting -= 1
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result


class Engine(threading.Thread):
    """The background thread of one rank, from ``init`` to ``shutdown``.

    ``opened`` has the ``comm`` of these ranks, on the CPU, for this thread alone.
    """

    def __init__(self, opened: Opened):
        super().__init__(name="labkit-horovod", daemon=True)
        self.opened = opened
        self.comm = opened.comm
        self.changed = threading.Condition()
        self.num_waiting = 0
        self._num_unnamed = Counter[str]()
        self._coordinator = Coordinator(self.comm.world_size)  # asked on rank 0 alone
        self._handles: dict[str, Handle] = {}
        self._new: list[Request] = []
        self._error: BaseException | None = None
        self._is_ending = False
        self.start()

    def submit(self, kind: str, name: str | None, tensor: Tensor, option: str = "") -> Handle:
        """Submit a collective (see ``Handle``), which begins once all ranks have submitted it.

        Without a name, what belongs together is the n-th of its kind on all ranks. ValueError for
        a name that is under way already, PeerLostError if a rank has ended.
        """
        handle = Handle(self, kind, option, tensor.detach(), caller_location())
        shape = list(tensor.shape)
        if kind == "allgather":
            del shape[0]  # may differ
        description = f"{kind} {option} {str(tensor.dtype).removeprefix('torch.')} {shape}"
        with self.changed:
            if self._error is not None:
                raise self._error
            if name is None:
                self._num_unnamed[kind] += 1
                name = f"noname.{self._num_unnamed[kind]}"
            name = f"{kind}.{name}"
            if name in self._handles:
                raise ValueError(
                    f"{name!r} is under way already, from {self._handles[name].location}: wait "
                    "for that one first, or give another name"
                )
            self._handles[name] = handle
            self._new.append(Request(name, description))
            self.changed.notify_all()
        return handle

    def run(self) -> None:
        torch.set_grad_enabled(False)
        had_decisions = True
        try:
            while self._await_work(had_decisions):
                decisions = self._negotiate()
                had_decisions = bool(decisions)
                self._run_collectives(decisions)
        except BaseException as error:
            self._fail(error)

    def _await_work(self, had_decisions: bool) -> bool:
        """Sleep until this rank has something to say; False when it has ended."""
        with self.changed:
            self.changed.wait_for(lambda: self._handles or self._is_ending)
            if had_decisions:
                # Collect more to fuse, unless the program waits.
                self.changed.wait_for(lambda: self.num_waiting or self._is_ending, CYCLE_S)
            else:
                # Nothing was ready: pause, unless there is news.
                self.changed.wait_for(lambda: self._new or self._is_ending, _PAUSE_S)
            return bool(self._handles)

    def _negotiate(self) -> list[Decision]:
        with self.changed:
            credit_to(next(iter(self._handles.values())).location)
            message = {"new": self._new, "waits": self.num_waiting > 0}
            self._new = []
        if self.comm.rank != 0:
            self._send(message, dst=0)
            return [Decision(*values) for values in self._recv(src=0)]
        other_ranks = range(1, self.comm.world_size)
        decisions = self._coordinator.decide([message, *map(self._recv, other_ranks)])
        for rank in other_ranks:
            self._send(decisions, rank)
        return decisions

    def _send(self, message: Any, dst: int) -> None:
        data = bytearray(json.dumps(message, separators=(",", ":")).encode())
        self.comm.send(torch.tensor(len(data)), dst)
        self.comm.send(torch.frombuffer(data, dtype=torch.uint8), dst)

    def _recv(self, src: int) -> Any:
        num_bytes = int(self.comm.recv(torch.tensor(0), src))
        data = self.comm.recv(torch.empty(num_bytes, dtype=torch.uint8), src)
        return json.loads(bytes(data.numpy()))

    def _run_collectives(self, decisions: Sequence[Decision]) -> None:
        agreed = [self._handles[decision.name] for decision in decisions if not decision.error]
        results = {}
        for group in fuse(agreed, FUSION_BYTES):
            for handle, result in zip(group, run_collective(self.comm, group)):
                if handle.kind == "allgather":
                    results[handle] = result.to(handle.tensor.device)
                else:
                    results[handle] = handle.tensor.copy_(result)
        with self.changed:
            for decision in decisions:
                # A deadlock ends on all ranks, also names that this one has not submitted.
                if decision.name in self._handles:
                    handle = self._handles.pop(decision.name)
                    handle.result = results.get(handle)
                    if decision.error:
                        handle.error = HorovodInternalError(decision.error)
            self.changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """End all that is under way with an error."""
        with self.changed:
            self._error = error
            for handle in self._handles.values():
                handle.error = error
            self._handles = {}
            self.changed.notify_all()
        self.comm.session.board.give_up(self.comm.rank, f"{type(error).__name__}: {error}")

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
    """Return the results, on the CPU, of one collective or of all-reduces that share a buffer."""
    first = handles[0]
    if first.kind == "allreduce":
        flat = torch.cat([handle.tensor.cpu().reshape(-1) for handle in handles])
        fast_all_reduce(comm, flat, first.option)
        parts = flat.split([handle.tensor.numel() for handle in handles])
        return [part.view(handle.tensor.shape) for part, handle in zip(parts, handles)]
    values = first.tensor.cpu().contiguous()
    if first.kind == "broadcast":
        return [broadcast(comm, values.clone(), int(first.option))]
    num_rows = all_gather(comm, torch.tensor(len(values)))
    received = [values.new_empty(int(rows), *values.shape[1:]) for rows in num_rows]
    return [torch.cat(all_to_all(comm, [values] * comm.world_size, received))]


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
