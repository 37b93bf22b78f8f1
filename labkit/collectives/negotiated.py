"""Collectives that ranks may issue in different orders: they agree by name on what runs next.

During backward one rank may finish gradient "a" first, and another gradient "b". If each began a
ring for its own, neither would end. So nothing begins before all ranks have it, and all carry out
the same list in the same order. Rank 0 makes this list: it is the coordinator. A thread of each
rank does this in the background, in cycles; one cycle, on each rank that has submitted something:

1. Take what was submitted since the last cycle: its name, kind, dtype, shape, .... 2. Send that to
rank 0. 3. Rank 0 notes it: a name is ready when all ranks have submitted it. 4. It compares what
they want; if they differ, all get an error that says what each has. All-reduces that are ready at
the same time are fused, up to 64 MiB. 5. Rank 0 sends the list to all. 6. All carry it out.

Messages of a cycle, besides those of the collectives: 2 from each other rank to rank 0 and 2 back,
a length and as many bytes of JSON; only the length where there is nothing to say. A rank that has
submitted nothing takes no part: then nothing can be ready, and the others sleep in step 2 until it
comes. If all have submitted something and nothing is ready, they pause, for 1 to 10 ms.

A rank without data calls ``join``: it contributes zeros to sums until all ranks have joined.

Symbols: P ranks. Source: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning
in TensorFlow" (2018), sections 3 and 4, and Horovod's documentation, "Tensor Fusion".
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.collectives.coordinator import Coordinator, named
from labkit.collectives.fused import carry_out
from labkit.collectives.handle import Handle
from labkit.collectives.requests import JOIN, Decision, Request, check
from labkit.comm.board import LEFT
from labkit.comm.comm import Comm
from labkit.comm.source_lines import credit_to
from labkit.errors import MismatchError, PeerLostError

# How long a tensor waits for others to be fused with, unless the program waits for it.
CYCLE_S = 1e-3
_LONGEST_PAUSE_S = 10e-3
# How long the end waits for what is under way.
_DRAIN_S = 2.0


class NegotiationError(MismatchError, RuntimeError):
    """Ranks want different things under one name, or wait for each other; says which and what."""


class Negotiator(threading.Thread):
    """The background thread of one rank.

    Args:
        comm: of these ranks, on the CPU, for this thread alone. It counts all that is sent.
    """

    def __init__(self, comm: Comm):
        super().__init__(name="labkit-negotiator", daemon=True)
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
    ) -> Handle:
        """Submit a collective, which begins once all ranks have submitted its name.

        Args:
            tensors: of this rank, which must not be changed before the end.
            take: makes what ``wait`` returns from the list of results.

        Raises:
            ValueError: the name is under way already, or see ``check``.
            PeerLostError: a rank has ended.
        """
        check(request, tensors, self.comm)
        handle = Handle(self, request, tensors, take)
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
            mine = {"new": [request.packed() for request in new], "waits": self._only_waits()}
        comm, others = self.comm, range(1, self.comm.world_size)
        if self._coordinator is None:
            self._send(mine, 0)
            decided = [Decision.unpacked(values) for values in self._recv(0)]
        else:
            decided = self._coordinator.decide([mine, *(self._recv(rank) for rank in others)])
            for rank in others:
                self._send([one.packed() for one in decided], rank)
        for decision in decided:
            self._carry_out(comm, decision)
        self._pause_s = 0 if decided else min(max(CYCLE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)

    def _only_waits(self) -> bool:
        """Whether all threads that have submitted something wait, so that nothing more comes."""
        # PyTorch's own threads work for the thread that called backward.
        own = (t for t in self._submitters if not isinstance(t, threading._DummyThread))
        return bool(self._waiters) and all(t in self._waiters or not t.is_alive() for t in own)

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

    def _carry_out(self, comm: Comm, decision: Decision) -> None:
        handles = [self._handles.get(request.name) for request in decision.requests]
        results: Sequence[Any] = [decision.last] * len(handles)
        error = NegotiationError(decision.error) if decision.error else None
        if error is None and decision.requests[0].kind != JOIN:
            results = carry_out(comm, decision, [h.values() if h else None for h in handles])
        with self._changed:
            for request in decision.requests:
                self._handles.pop(request.name, None)
        for handle, result in zip(handles, results):
            if handle is not None:
                handle.finish(result, error)

    def why_late(self, handle: Handle) -> str:
        """A line on a collective that has waited for long."""
        ops = self.comm.session.board.ranks["op"]
        idle = [rank for rank, op in enumerate(ops) if not op and rank != self.comm.rank]
        who = f"nothing is under way on {named(idle)}" if idle else "others wait for other names"
        return (
            f"rank {self.comm.rank} still waits for {handle.request.name!r} "
            f"({handle.request.described()}), called at {handle.location}: {who}. Do all ranks "
            "submit this name?"
        )

    def _fail(self, error: BaseException) -> None:
        """The thread ends with an error, and so does all that is under way."""
        with self._changed:
            handles, self._handles = self._handles, {}
            if isinstance(error, PeerLostError):
                error = PeerLostError(self._of_loss(error, handles), error.rank)
            self._error = error
        self.comm.session.board.give_up(self.comm.rank, f"{type(error).__name__}: {error}")
        for handle in handles.values():
            handle.finish(None, error)

    def _of_loss(self, error: PeerLostError, handles: dict[str, Handle]) -> str:
        why, ranks = str(error), self.comm.session.board.ranks
        if error.rank is not None and ranks[error.rank]["state"] == LEFT:
            why = (
                f"rank {error.rank} takes no part any more: it has called shutdown() or has ended"
            )
        names = [f"{name!r} of {handle.location}" for name, handle in handles.items()]
        return f"{why}. Unfinished on rank {self.comm.rank}: {', '.join(names) or 'nothing'}"

    def end(self, drain: bool = True) -> None:
        """End the thread. To ``drain`` gives what is under way a moment to finish."""
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self.join(_DRAIN_S if drain else 0)
        if self.is_alive():
            self.comm.transport.abandon()
            self.join(_DRAIN_S)
