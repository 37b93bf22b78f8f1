"""Collectives that ranks may submit in different orders: they agree by name on what runs next.

A thread of each rank does this in the background, in cycles; one cycle, on each rank that has
submitted something:

1. Take what was submitted since the last cycle. 2. Send that to rank 0, the ``Coordinator``. 3. A
name is ready when all ranks have submitted it. 4. Rank 0 compares what they want; if they differ,
all get an error that says what each has. All-reduces that are ready at the same time are fused, as
a ring costs 2 (P - 1) latencies at any size. 5. Rank 0 sends the list to all. 6. All carry it out.

Messages of a cycle, besides those of the collectives: 2 from each other rank to rank 0 and 2 back,
a length and as many bytes of JSON. A rank that has submitted nothing takes no part: then nothing
can be ready, and the others sleep in step 2 until it comes.

Symbols: P ranks. Source: as ``labkit.horovod.coordinator``.
"""

import itertools
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.collectives import all_to_all, broadcast, fast_ring_all_reduce, reduce_scatter
from labkit.collectives.common import mean_of
from labkit.comm.comm import Comm
from labkit.comm.source_lines import caller_location, credit_to
from labkit.errors import MismatchError, PeerLostError
from labkit.horovod.coordinator import BY_ROWS, JOIN, Coordinator, Decision, Request
from labkit.runtime.torchrun import Opened, open_for

# How long a tensor waits for others to be fused with, unless the program waits for it.
CYCLE_S = 1e-3
# The pause where all have submitted something, and nothing is ready.
_PAUSE_S = 5e-3
# How long the end waits for what is under way.
_DRAIN_S = 2.0


class NegotiationError(MismatchError, RuntimeError):
    """Ranks want different things under one name, or wait for each other; says which and what."""


class Handle:
    """One submitted collective: the caller waits here, and gets what ``take`` makes of it."""

    def __init__(self, engine: "Engine", tensor: Tensor | None, take: Callable[[Any], Any]):
        self.engine, self.tensor, self.take = engine, tensor, take
        self.location, self.is_done = caller_location(), False
        self.result: Any = None
        self.error: BaseException | None = None

    def wait(self) -> Any:
        """The result; NegotiationError if ranks do not agree, PeerLostError if one has ended."""
        engine = self.engine
        with engine.changed:
            engine.num_waiting += 1
            engine.changed.notify_all()
            try:
                engine.changed.wait_for(lambda: self.is_done)
            finally:
                engine.num_waiting -= 1
        if self.error is not None:
            raise self.error
        self.result, self.take = self.take(self.result), lambda result: result
        return self.result

    # Horovod's handle of a sparse all-reduce is called.
    __call__ = wait


class Engine(threading.Thread):
    """The background thread of one rank, from ``init`` to ``shutdown``.

    ``opened`` has the ``comm`` of these ranks, on the CPU, for this thread alone.
    """

    def __init__(self, opened: Opened):
        super().__init__(name="labkit-horovod", daemon=True)
        self.opened, self.comm = opened, opened.comm
        # By kind, the number of the next collective without a name.
        self.numbers: dict[str, itertools.count[int]] = {}
        self.changed, self.num_waiting = threading.Condition(), 0
        self._coordinator = Coordinator(self.comm.world_size) if self.comm.rank == 0 else None
        self._handles: dict[str, Handle] = {}
        self._new: list[Request] = []
        self._error: BaseException | None = None
        self._is_ending = self._is_idle = False
        self.start()

    def submit(
        self,
        kind: str,
        name: str | None,
        tensor: Tensor | None = None,
        take: Callable[[Any], Any] = lambda result: result,
        option: str = "",
        splits: Sequence[int] = (),
    ) -> Handle:
        """Submit a collective, which begins once all ranks have submitted its name.

        Without a name, what belongs together is the n-th of its kind on all ranks. ``take`` makes
        the caller's result of what ``carry_out`` returns.

        Raises:
            ValueError: the name is under way already, or a tensor without rows.
            PeerLostError: a rank has ended.
        """
        if name is None:
            name = f"noname.{next(self.numbers.setdefault(kind, itertools.count(1)))}"
        request = Request(name if kind == JOIN else f"{kind}.{name}", kind, option)
        if tensor is not None:
            dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
            if kind in (*BY_ROWS, "reducescatter") and not shape:
                raise ValueError(f"{kind} works along rows: use tensor.reshape(1)")
            if kind in BY_ROWS:
                request = request._replace(rows=splits or shape[0])
                del shape[0]
            request = request._replace(dtype=dtype, shape=shape)
        handle = Handle(self, tensor, take)
        with self.changed:
            if self._error is not None:
                raise self._error
            if (other := self._handles.get(request.name)) is not None:
                raise ValueError(
                    f"{request.name!r} is under way already, from {other.location}: wait for that "
                    "one first, or give another name"
                )
            self._handles[request.name] = handle
            self._new.append(request)
            self.changed.notify_all()
        return handle

    def run(self) -> None:
        torch.set_grad_enabled(False)
        try:
            while self._await_work():
                self._cycle()
        except BaseException as error:
            self._fail(error)

    def _await_work(self) -> bool:
        """Sleep until this rank has something to say; False when it has ended."""
        with self.changed:
            self.changed.wait_for(lambda: self._handles or self._is_ending)
            # Nothing was ready: pause, unless there is news. Else: collect, unless it is urgent.
            pause_s = _PAUSE_S if self._is_idle else CYCLE_S
            self.changed.wait_for(
                lambda: self._is_ending or (self._new if self._is_idle else self.num_waiting),
                pause_s,
            )
            return bool(self._handles)

    def _cycle(self) -> None:
        with self.changed:
            credit_to(next(iter(self._handles.values())).location)
            new, self._new = self._new, []
            mine = {"new": new, "waits": self.num_waiting > 0}
        others = range(1, self.comm.world_size)
        if self._coordinator is None:
            self._send(mine, 0)
            decided = [
                Decision([Request(*one) for one in requests], *rest)
                for requests, *rest in self._recv(0)
            ]
        else:
            decided = self._coordinator.decide([mine, *(self._recv(rank) for rank in others)])
            for rank in others:
                self._send(decided, rank)
        for decision in decided:
            self._carry_out(decision)
        self._is_idle = not decided

    def _send(self, what: Any, dst: int) -> None:
        data = bytearray(json.dumps(what, separators=(",", ":")).encode()) if what else b""
        self.comm.send(torch.tensor(len(data)), dst)
        if data:
            self.comm.send(torch.frombuffer(data, dtype=torch.uint8), dst)

    def _recv(self, src: int) -> Any:
        data = torch.empty(int(self.comm.recv(torch.tensor(0), src)), dtype=torch.uint8)
        return json.loads(bytes(self.comm.recv(data, src).numpy())) if len(data) else []

    def _carry_out(self, decision: Decision) -> None:
        handles = [self._handles.get(request.name) for request in decision.requests]
        tensors = [None if handle is None else handle.tensor for handle in handles]
        error, results = None, [None] * len(handles)
        if decision.error:
            error = NegotiationError(decision.error)
        else:
            values = [None if t is None else t.detach().cpu().contiguous() for t in tensors]
            results = carry_out(self.comm, decision, values)
        with self.changed:
            for request, handle, result in zip(decision.requests, handles, results):
                if handle is not None:
                    handle.result, handle.error, handle.is_done = result, error, True
                    del self._handles[request.name]
            self.changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """The thread ends with an error, and so does all that is under way."""
        with self.changed:
            if isinstance(error, PeerLostError):
                names = [f"{name!r} of {one.location}" for name, one in self._handles.items()]
                mine = f"Unfinished on rank {self.comm.rank}: {', '.join(names) or 'nothing'}"
                error = PeerLostError(f"{error}. {mine}", error.rank)
            self._error = error
            for handle in self._handles.values():
                handle.error, handle.is_done = error, True
            self._handles = {}
            self.changed.notify_all()
        self.comm.session.board.give_up(self.comm.rank, f"{type(error).__name__}: {error}")

    def end(self, drain: bool = True) -> None:
        """End the thread. To ``drain`` gives what is under way a moment to finish."""
        with self.changed:
            self._is_ending = True
            self.changed.notify_all()
        self.join(_DRAIN_S if drain else 0)
        if self.is_alive():
            self.comm.transport.abandon()
            self.join(_DRAIN_S)


def carry_out(comm: Comm, decision: Decision, values: Sequence[Tensor | None]) -> list[Any]:
    """The results of each request, on the CPU; by rows the parts of all ranks.

    Args:
        values: by request, this rank's tensor on the CPU, None for zeros; they are not changed.
    """
    request, mine = decision.requests[0], values[0]
    op = request.option
    if op == "mean":
        op = mean_of(getattr(torch, request.dtype))
    if request.kind == "allreduce":
        # 1. Copy the tensors into a buffer. 2. One ring. 3. Cut the results out.
        empty = torch.empty(0, dtype=getattr(torch, request.dtype))
        pieces = [
            empty.new_zeros(one.shape) if value is None else value
            for one, value in zip(decision.requests, values)
        ]
        total = torch.cat([piece.reshape(-1) for piece in pieces])
        fast_ring_all_reduce(comm, total, op)
        parts = total.split([piece.numel() for piece in pieces])
        return [part.view(piece.shape) for part, piece in zip(parts, pieces)]
    if request.kind == "broadcast" and mine is not None:
        return [broadcast(comm, mine.clone(), int(request.option))]
    if request.kind == "reducescatter" and mine is not None:
        # The first ranks have one row more if need be.
        shares = list(mine.tensor_split(comm.world_size))
        return [reduce_scatter(comm, shares, op)]
    if request.kind in BY_ROWS and mine is not None:
        theirs, shares = decision.rows, [mine] * comm.world_size
        if request.kind == "alltoall":
            theirs = [splits[comm.rank] for splits in decision.rows]
            shares = list(mine.split(decision.rows[comm.rank]))
        return [all_to_all(comm, shares, [mine.new_empty(n, *request.shape) for n in theirs])]
    return [decision.last]


_engine: Engine | None = None


def init(comm: Comm | Sequence[int] | None = None) -> None:
    """Join the other ranks, unless this one has. ``comm``: of ``labkit.run``, or all ranks."""
    global _engine
    if _engine is None:
        _engine = Engine(open_for("horovod", comm if isinstance(comm, Comm) else None, shutdown))
    size = _engine.comm.world_size
    if not isinstance(comm, Comm | None) and list(comm) not in ([], list(range(size))):
        raise ValueError(f"init({comm!r}): all {size} ranks take part, so call init() without it")


def shutdown() -> None:
    """Leave the other ranks; ``init`` joins them again."""
    global _engine
    ended, _engine = _engine, None
    if ended is not None and ended.opened.is_mine():
        ended.end(drain=not ended.opened.has_failed)
        ended.opened.close()


def is_initialized() -> bool:
    return _engine is not None


def engine() -> Engine:
    """The thread that carries everything out; its ``comm`` counts what is sent."""
    if _engine is None:
        raise ValueError("labkit.horovod has not been initialized: call hvd.init() first")
    return _engine
