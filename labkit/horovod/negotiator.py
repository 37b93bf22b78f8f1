"""Collectives that ranks may submit in different orders: they agree by name on what runs next.

A thread of each rank does this in the background, in cycles; one cycle, on each rank that has
submitted something:

1. Take what was submitted since the last cycle: its name, kind, dtype, shape, .... 2. Send that to
rank 0, the ``Coordinator``. 3. A name is ready when all ranks have submitted it. 4. Rank 0
compares what they want; if they differ, all get an error that says what each has. All-reduces
that are ready at the same time are fused, up to 64 MiB. 5. Rank 0 sends the list to all. 6. All
carry it out: small all-reduces in one buffer, as a ring costs 2 (P - 1) latencies at any size.

Messages of a cycle, besides those of the collectives: 2 from each other rank to rank 0 and 2 back,
a length and as many bytes of JSON; only the length where there is nothing to say. A rank that has
submitted nothing takes no part: then nothing can be ready, and the others sleep in step 2 until it
comes. If all have submitted something and nothing is ready, they pause, for 1 to 10 ms.

Symbols: P ranks. Source: as ``labkit.horovod.coordinator``.
"""

import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.collectives import all_to_all, broadcast, fast_ring_all_reduce, reduce_scatter
from labkit.collectives.common import Reduction, check_root, in_place as lend_in_place
from labkit.collectives.ring import share_only
from labkit.comm.board import LEFT
from labkit.comm.comm import Comm
from labkit.comm.source_lines import caller_location, credit_to
from labkit.errors import MismatchError, PeerLostError
from labkit.horovod.coordinator import BY_ROWS, JOIN, Coordinator, Decision, Request
from labkit.schedules.ring import owned_chunk

# How long a tensor waits for others to be fused with, unless the program waits for it.
CYCLE_S = 1e-3
_LONGEST_PAUSE_S = 10e-3
# How long the end waits for what is under way.
_DRAIN_S = 2.0


class NegotiationError(MismatchError, RuntimeError):
    """Ranks want different things under one name, or wait for each other; says which and what."""


class Handle:
    """One submitted collective: the caller waits here, and gets the result.

    Args:
        tensors: of this rank.
        take: makes what ``wait`` returns from the list of results.
        in_place: whether the results go into the tensors themselves.
    """

    def __init__(
        self,
        engine: "Engine",
        request: Request,
        tensors: Sequence[Tensor],
        take: Callable[[Any], Any],
        in_place: bool,
    ):
        self.request, self.tensors = request, tensors
        self.location = caller_location()
        self._engine, self._take, self._in_place = engine, take, in_place
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._result: Any = None

    def wait(self) -> Any:
        """Wait for the result, and return it.

        Raises:
            NegotiationError: the ranks do not agree, or none of them can go on.
            PeerLostError: a rank has ended.
        """
        if not self._done.is_set():
            with self._engine.waiting():
                self._done.wait()
        if self._error is not None:
            raise self._error
        return self._take(self._result)

    def is_done(self) -> bool:
        return self._done.is_set()

    def finish(self, result: Any, error: BaseException | None = None) -> None:
        """Let ``wait`` return ``result``: tensors move to the devices that theirs are on."""
        try:
            if isinstance(result, list) and self._in_place:
                for tensor, values in zip(self.tensors, result):
                    tensor.detach().copy_(values)
                result = list(self.tensors)
            elif isinstance(result, list):
                # (An alltoall has one tensor and two results.) A part of a buffer is cloned:
                # otherwise it would keep all of the buffer in memory.
                targets = itertools.chain(self.tensors, self.tensors)
                result = [
                    (one.clone() if one.untyped_storage().nbytes() > one.nbytes else one).to(
                        tensor.device
                    )
                    for one, tensor in zip(result, targets)
                ]
        except Exception as raised:
            error = raised
        self._result, self._error = result, error
        self._done.set()


class Engine(threading.Thread):
    """The background thread of one rank.

    Args:
        comm: of these ranks, on the CPU, for this thread alone. It counts all that is sent.
    """

    def __init__(self, comm: Comm):
        super().__init__(name="labkit-horovod", daemon=True)
        self.comm = comm
        self._coordinator = Coordinator(comm.world_size) if comm.rank == 0 else None
        self._changed = threading.Condition()
        self._handles: dict[str, Handle] = {}
        self._new: list[Request] = []
        self._submitters, self._waiters = set[threading.Thread](), list[threading.Thread]()
        self._error: BaseException | None = None
        self._is_ending = False
        self._pause_s = 0.0
        self.start()

    def submit(
        self,
        request: Request,
        tensors: Sequence[Tensor] = (),
        take: Callable[[Any], Any] = lambda result: result,
        in_place: bool = False,
    ) -> Handle:
        """Submit a collective, which begins once all ranks have submitted its name.

        Args:
            tensors: of this rank, which must not be changed before the end.
            take, in_place: see ``Handle``.

        Raises:
            ValueError: the name is under way already, not a dense tensor, a dtype that cannot be
                reduced, no first dimension, a root that is not a rank, splits that do not add up.
            PeerLostError: a rank has ended.
        """
        _check(request, tensors, in_place, self.comm)
        handle = Handle(self, request, tensors, take, in_place)
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._is_ending or not self.is_alive():
                raise ValueError(f"{request.name!r} comes after the end: initialize again")
            if (other := self._handles.get(request.name)) is not None:
                raise ValueError(
                    f"{request.name!r} is under way already, from {other.location}: ranks agree "
                    "by name, so wait for that one first, or give another name"
                )
            self._submitters.add(threading.current_thread())
            self._handles[request.name] = handle
            self._new.append(request)
            self._changed.notify()
        return handle

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which this thread waits for a result, and submits nothing."""
        me = threading.current_thread()
        with self._changed:
            self._waiters.append(me)
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._waiters.remove(me)

    def run(self) -> None:
        torch.set_grad_enabled(False)
        try:
            while self._await_work():
                self._cycle()
        except BaseException as error:
            self._fail(error)

    def _await_work(self) -> bool:
        """Sleep until this rank has something to say; False when it has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._handles or self._is_ending)
            # Nothing was ready: pause, unless there is news. Else: collect, unless it is urgent.
            stops = self._new if self._pause_s else self._waiters
            pause_s = self._pause_s or CYCLE_S
            self._changed.wait_for(lambda: stops or self._is_ending, pause_s)
            return bool(self._handles)

    def _cycle(self) -> None:
        with self._changed:
            new, self._new = self._new, []
            credit_to(next(iter(self._handles.values())).location)
            # PyTorch's own threads work for the thread that called backward.
            own = [t for t in self._submitters if not isinstance(t, threading._DummyThread)]
            waits = bool(self._waiters) and all(
                thread in self._waiters or not thread.is_alive() for thread in own
            )
        mine = {"new": [astuple(request) for request in new], "waits": waits}
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
                self._send([astuple(one) for one in decided], rank)
        for decision in decided:
            self._carry_out(decision)
        self._pause_s = 0 if decided else min(max(CYCLE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)

    def _send(self, what: Any, dst: int) -> None:
        data = bytearray(json.dumps(what, separators=(",", ":")).encode()) if what else b""
        self.comm.send(torch.tensor(len(data)), dst)
        if data:
            self.comm.send(torch.frombuffer(data, dtype=torch.uint8), dst)

    def _recv(self, src: int) -> Any:
        length = int(self.comm.recv(torch.tensor(0), src))
        if not length:
            return []
        return json.loads(
            bytes(self.comm.recv(torch.empty(length, dtype=torch.uint8), src).numpy())
        )

    def _carry_out(self, decision: Decision) -> None:
        handles = [self._handles.get(request.name) for request in decision.requests]
        results: Sequence[Any] = [decision.last] * len(handles)
        error = NegotiationError(decision.error) if decision.error else None
        if error is None and decision.requests[0].kind != JOIN:
            values = [
                [tensor.detach().cpu() for tensor in handle.tensors]
                if handle is not None and handle.request.has_value
                else None
                for handle in handles
            ]
            results = carry_out(self.comm, decision, values)
        with self._changed:
            for request in decision.requests:
                self._handles.pop(request.name, None)
        for handle, result in zip(handles, results):
            if handle is not None:
                handle.finish(result, error)

    def _fail(self, error: BaseException) -> None:
        """The thread ends with an error, and so does all that is under way."""
        board = self.comm.session.board
        with self._changed:
            handles, self._handles = self._handles, {}
            if isinstance(error, PeerLostError):
                why, lost = str(error), error.rank
                if lost is not None and board.ranks[lost]["state"] == LEFT:
                    why = f"rank {lost} takes no part any more: it called shutdown() or ended"
                names = [f"{name!r} of {handle.location}" for name, handle in handles.items()]
                mine = f"Unfinished on rank {self.comm.rank}: {', '.join(names) or 'nothing'}"
                error = PeerLostError(f"{why}. {mine}", lost)
            self._error = error
        board.give_up(self.comm.rank, f"{type(error).__name__}: {error}")
        for handle in handles.values():
            handle.finish(None, error)

    def end(self, drain: bool = True) -> None:
        """End the thread. To ``drain`` gives what is under way a moment to finish."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self.join(_DRAIN_S if drain else 0)
        if self.is_alive():
            self.comm.transport.abandon()
            self.join(_DRAIN_S)


def _check(request: Request, tensors: Sequence[Tensor], in_place: bool, comm: Comm) -> None:
    """Check what one rank can check alone, before anything is submitted."""
    for tensor in tensors:
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(f"{request.kind} is for tensors on CPU or CUDA, not {tensor.device}")
        if in_place or tensor.layout != torch.strided:
            with lend_in_place(tensor):
                pass
        if request.op:
            Reduction.of("sum" if request.op == "mean" else request.op, tensor)
        if request.kind in (*BY_ROWS, "reducescatter") and tensor.dim() == 0:
            raise ValueError(
                f"{request.kind} works along the first dimension, and {request.name!r} has none: "
                "use tensor.reshape(1)"
            )
    if request.kind == "broadcast":
        root: Any = request.root
        check_root(comm, root)
    if request.kind == "alltoall":
        splits, rows = request.splits, request.shapes[0][0]
        if len(splits) != comm.world_size or min(splits) < 0 or sum(splits) != rows:
            raise ValueError(
                f"alltoall of {rows} rows cannot be split as {splits}: give {comm.world_size} "
                "numbers, one for each rank, which add up to all rows"
            )


def carry_out(
    comm: Comm, decision: Decision, values: Sequence[list[Tensor] | None]
) -> list[list[Tensor] | None]:
    """The results of each request, on the CPU; None for one that no rank has a value for.

    Args:
        values: by request, this rank's tensors on the CPU, None for zeros; they are not changed.
    """
    request, mine = decision.requests[0], list(values[0] or [])
    if request.kind == "allreduce":
        return _fused_all_reduce(comm, decision.requests, values)
    if request.kind == "allgather":
        rows = [list(of_tensor) for of_tensor in zip(*decision.rows)]
        return [[_gathered_rows(comm, one, counts) for one, counts in zip(mine, rows)]]
    if request.kind == "broadcast":
        assert request.root is not None
        return [[broadcast(comm, one.clone(), request.root) for one in mine]]
    if request.kind == "alltoall":
        counts = [splits[comm.rank] for splits in decision.rows]
        out = [mine[0].new_empty(count, *mine[0].shape[1:]) for count in counts]
        all_to_all(comm, list(mine[0].split(decision.rows[comm.rank])), out)
        return [[torch.cat(out), torch.tensor(counts, dtype=torch.int32)]]
    if request.kind == "reducescatter":

        def scattered(tensor: Tensor, op: str) -> Tensor:
            # The first ranks have one row more if need be.
            return reduce_scatter(comm, list(tensor.tensor_split(comm.world_size)), op)

        return [[_reduced(comm, one, request, scattered) for one in mine]]
    # A barrier: all ranks have come.
    return [[]]


def _fused_all_reduce(
    comm: Comm, requests: Sequence[Request], values: Sequence[list[Tensor] | None]
) -> list[list[Tensor] | None]:
    """1. Copy the tensors into a buffer for each dtype. 2. One ring each. 3. Cut results out."""
    pieces: dict[str, list[Tensor]] = {}
    wanted = [(one, mine) for one, mine in zip(requests, values) if one.has_value]
    for request, mine in wanted:
        for place, (dtype, shape) in enumerate(zip(request.dtypes, request.shapes)):
            value = (
                torch.zeros(shape, dtype=getattr(torch, dtype)) if mine is None else mine[place]
            )
            pieces.setdefault(dtype, []).append(value.reshape(-1))
    results = {}
    for dtype, of in pieces.items():
        total = _reduced(comm, torch.cat(of), requests[0], partial(fast_ring_all_reduce, comm))
        results[dtype] = iter(total.split([len(piece) for piece in of]))
    return [
        [next(results[d]).view(s) for d, s in zip(request.dtypes, request.shapes)]
        if request.has_value
        else None
        for request in requests
    ]


def _reduced(
    comm: Comm, values: Tensor, request: Request, collective: Callable[[Tensor, str], Tensor]
) -> Tensor:
    """``collective`` on the scaled values, scaled; what is an integer is rounded towards 0."""
    is_exact = not (values.is_floating_point() or values.is_complex())

    def scaled(tensor: Tensor, factor: float) -> Tensor:
        if factor == 1:
            return tensor
        wide = tensor.double() if is_exact else tensor
        return (wide * factor).to(tensor.dtype)

    op = "sum" if request.op == "mean" and is_exact else request.op
    total = collective(scaled(values, request.prescale), op)
    if op != request.op:
        total = scaled(total, 1 / comm.world_size)
    return scaled(total, request.postscale)


def _gathered_rows(comm: Comm, mine: Tensor, rows: list[int]) -> Tensor:
    """All ranks' tensors, one below the other; ``rows`` says how many each has."""
    out = mine.new_empty(sum(rows), *mine.shape[1:])
    parts = out.split(rows)
    parts[comm.rank].copy_(mine)
    # Rank c - 1 owns chunk c.
    chunks = {owned_chunk(rank, comm.world_size): part for rank, part in enumerate(parts)}
    share_only(comm, [chunks[number] for number in range(comm.world_size)])
    return out
