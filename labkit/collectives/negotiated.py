"""Collectives that ranks may issue in different orders: they agree by name on what runs next.

During backward two ranks may finish gradient "a" and gradient "b" in different orders. If each
began a ring for its first one, neither would end. So each rank has a background thread, and rank
0 is the coordinator: nothing begins before it has heard of it from all ranks, and all ranks carry
out what it says, in its order. One cycle, on every rank that has submitted something:

1. Take what was submitted since the last cycle, as ``Request``: name, kind, dtypes, shapes, ....
2. Send it to rank 0 as JSON, after its length. 3. Rank 0 notes it: a tensor is ready when all ranks
have submitted its name. 4. It compares what they want; ranks that differ get an error that says
what each one has. All-reduces that are ready together are fused, up to 64 MiB. 5. Rank 0 sends this
list to every rank. 6. All carry it out (``fused``): one ring for all tensors of a buffer.

Messages of a cycle: 2 from each rank to rank 0, and 2 back to it (1 where there is nothing to
say): at most 4 (P - 1), besides those of the rings. A rank that has submitted nothing takes part in
no cycle; the others sleep in step 2 until it comes. While all ranks have submitted something, and
nothing in common, a cycle is followed by a pause of 1 to 10 ms.

A rank that has joined has no data left: it contributes zeros to all-reduces until all have joined.

Symbols: P ranks. Source: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning
in TensorFlow" (2018), sections 3 and 5.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.collectives import fused
from labkit.collectives.fused import JOIN, Request
from labkit.comm.comm import Comm
from labkit.errors import MismatchError, PeerLostError

FUSION_BYTES = 64 * 2**20
# How long a submitted tensor waits for others to be fused with, unless somebody waits for it.
CYCLE_S = 1e-3
_LONGEST_PAUSE_S = 10e-3
# All ranks wait, and nothing is submitted: after so long nothing more will come.
_STUCK_S = 2.0
# A wait of this length is worth a word on stderr.
STALL_S = 60.0
# What is under way when the program ends may take so long.
_DRAIN_S = 2.0


class NegotiationError(MismatchError, RuntimeError):
    """The ranks do not agree on a collective, or wait for each other's; names ranks and tensors."""


class Handle:
    """One submitted collective; ``wait`` returns its result, a list of tensors or one number."""

    def __init__(self, engine: "Negotiator", request: Request, tensors: list[Tensor], take: Any):
        self.request, self.tensors, self._take = request, tensors, take
        self._engine = engine
        # On a GPU the values are there when its stream has come to this point.
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        self.ready = [torch.cuda.current_stream(device).record_event() for device in devices]
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def finish(self, result: Any, error: BaseException | None = None) -> None:
        self._result, self._error = result, error
        self._done.set()

    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> Any:
        """Wait, and return the result.

        Raises:
            NegotiationError: the ranks want different things under this name, or none can go on.
            PeerLostError: a rank has ended.
        """
        if not self._done.is_set():
            with self._engine.waiting():
                while not self._done.wait(STALL_S):
                    print(f"labkit: {self._engine.why_late(self)}", file=sys.stderr, flush=True)
        if self._error is not None:
            raise self._error
        return self._result if self._take is None else self._take(self._result)


class Negotiator(threading.Thread):
    """The background thread of one rank.

    Args:
        comm: of these ranks, on the CPU; used by this thread alone. It counts all that is sent.
    """

    def __init__(self, comm: Comm):
        super().__init__(name="labkit-negotiator", daemon=True)
        self.comm = comm
        self._changed = threading.Condition()
        self._handles: dict[str, Handle] = {}
        self._new: list[Request] = []
        self._submitters, self._waiters = set[threading.Thread](), list[threading.Thread]()
        self._error: BaseException | None = None
        self._closing = False
        self._pause_s = 0.0
        # Of the coordinator: what each rank has submitted, by name.
        self._table: dict[str, dict[int, Request]] = {}
        self._quiet_since_s: float | None = None
        self.start()

    def submit(
        self,
        request: Request,
        tensors: Sequence[Tensor] = (),
        take: Callable[[Any], Any] | None = None,
    ) -> Handle:
        """Submit a collective, to be carried out once all ranks have submitted this name.

        Args:
            take: makes what ``wait`` returns of the result.

        Raises:
            ValueError: this name is under way already; or one of ``Request.check``.
        """
        fused.check(request, tensors, self.comm)
        handle = Handle(self, request, list(tensors), take)
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._closing:
                raise ValueError(
                    f"{request.name!r} is submitted after shutdown(): call init() again"
                )
            if request.name in self._handles:
                raise ValueError(
                    f"{request.name!r} is under way on rank {self.comm.rank} already: ranks agree "
                    "by name, so give another name, or synchronize the first one before"
                )
            self._submitters.add(threading.current_thread())
            self._handles[request.name] = handle
            self._new.append(request)
            self._changed.notify()
        return handle

    def waiting(self) -> "_Waiting":
        return _Waiting(self._changed, self._waiters)

    def run(self) -> None:
        torch.set_grad_enabled(False)
        try:
            while self._await_work():
                self._cycle()
        except BaseException as error:
            self._fail(error)

    def _await_work(self) -> bool:
        """Sleep until this rank has something to say; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._handles or self._closing)
            if self._handles and not self._closing:
                rest_s = self._pause_s or (0.0 if self._waiters else CYCLE_S)
                has_news = (lambda: self._new) if self._pause_s else (lambda: self._waiters)
                self._changed.wait_for(has_news, rest_s)
            return bool(self._handles)

    def _cycle(self) -> None:
        with self._changed:
            new, self._new = self._new, []
            told = {"new": [request.packed() for request in new], "waits": self._only_waits()}
        everyone = self._to_coordinator(told)
        decided = self._from_coordinator(self._decide(everyone) if everyone else None)
        for one in decided:
            self._carry_out(one)
        self._pause_s = 0.0 if decided else min(max(CYCLE_S, 2 * self._pause_s), _LONGEST_PAUSE_S)

    def _only_waits(self) -> bool:
        """Whether no thread that has ever submitted will, before one of its waits has ended."""
        # Autograd's threads on a GPU are no threads of Python: they work for one that waits.
        own = (t for t in self._submitters if not isinstance(t, threading._DummyThread))
        return bool(self._waiters) and all(t in self._waiters or not t.is_alive() for t in own)

    # Steps 2 and 5

    def _to_coordinator(self, told: dict[str, Any]) -> list[dict[str, Any]]:
        if self.comm.rank != 0:
            self._send(told, 0)
            return []
        return [told, *(self._recv(rank) for rank in range(1, self.comm.world_size))]

    def _from_coordinator(self, decided: list[Any] | None) -> list[Any]:
        if decided is None:
            return self._recv(0)
        for rank in range(1, self.comm.world_size):
            self._send(decided, rank)
        return decided

    def _send(self, what: Any, dst: int) -> None:
        data = json.dumps(what, separators=(",", ":")).encode() if what else b""
        self.comm.send(torch.tensor(len(data)), dst)
        if data:
            self.comm.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), dst)

    def _recv(self, src: int) -> Any:
        length = int(self.comm.recv(torch.tensor(0), src))
        if not length:
            return []
        data = self.comm.recv(torch.empty(length, dtype=torch.uint8), src)
        return json.loads(bytes(data.numpy()))

    # Steps 3 and 4, on rank 0

    def _decide(self, everyone: list[dict[str, Any]]) -> list[Any]:
        """What all ranks carry out now: lists of requests, with an error for those that differ."""
        for rank, told in enumerate(everyone):
            for packed in told["new"]:
                request = Request.unpacked(packed)
                self._table.setdefault(request.name, {})[rank] = request
        joined = list(self._table.get(JOIN, {}))
        decided = list[Any]()
        for name, of in list(self._table.items()):
            if len({*of, *joined}) == self.comm.world_size and (name != JOIN or not decided):
                if name == JOIN and len(self._table) > 1:
                    continue
                decided.append(fused.agreed(of, joined, self.comm.world_size))
                del self._table[name]
        if not decided and self._are_stuck(everyone):
            why = self._explained()
            decided = [fused.refused(next(iter(of.values())), why) for of in self._table.values()]
            self._table.clear()
        return fused.fuse(decided, FUSION_BYTES)

    def _are_stuck(self, everyone: list[dict[str, Any]]) -> bool:
        is_quiet = all(told["waits"] and not told["new"] for told in everyone)
        now_s = time.monotonic()
        self._quiet_since_s = (self._quiet_since_s or now_s) if is_quiet else None
        return self._quiet_since_s is not None and now_s - self._quiet_since_s > _STUCK_S

    def _explained(self) -> str:
        lines = [
            f"  {of and next(iter(of.values())).described()} {name!r}: submitted by rank "
            f"{', '.join(map(str, sorted(of)))}, not by rank "
            f"{', '.join(str(r) for r in range(self.comm.world_size) if r not in of)}"
            for name, of in self._table.items()
        ]
        return (
            "deadlock: all ranks wait, each for a collective that others have not submitted:\n"
            + "\n".join(lines)
            + "\nNext step: submit the same names on all ranks (without a name it is the order of "
            "the calls that counts)."
        )

    # Step 6

    def _carry_out(self, packed: Any) -> None:
        decided = fused.Decided.unpacked(packed)
        handles = [self._handles.get(request.name) for request in decided.requests]
        error = NegotiationError(decided.error) if decided.error else None
        results = [None] * len(handles) if error else fused.carry_out(self.comm, decided, handles)
        with self._changed:
            for request in decided.requests:
                self._handles.pop(request.name, None)
        for handle, result in zip(handles, results):
            if handle is not None:
                handle.finish(result, error)

    # The end

    def why_late(self, handle: Handle) -> str:
        ranks = self.comm.session.board.ranks
        absent = [
            r for r in range(self.comm.world_size) if r != self.comm.rank and not ranks[r]["op"]
        ]
        named = ", ".join(f"rank {rank}" for rank in absent) or "ranks that have submitted others"
        return (
            f"rank {self.comm.rank} has waited {STALL_S:g} s more for {handle.request.name!r} "
            f"({handle.request.described()}): {named} may not have submitted it"
        )

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            names = ", ".join(map(repr, self._handles))
            if isinstance(error, PeerLostError):
                error = PeerLostError(
                    f"{error}. Not finished on rank {self.comm.rank}: {names}", error.rank
                )
            self._error, handles = error, list(self._handles.values())
            self._handles.clear()
        self.comm.session.board.give_up(self.comm.rank, f"{type(error).__name__}: {error}")
        for handle in handles:
            handle.finish(None, error)

    def end(self, drain: bool = True) -> None:
        """End the thread; unless not to ``drain``, what is under way gets a moment to finish."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self.join(_DRAIN_S if drain else 0)
        if self.is_alive():
            self.comm.transport.abandon()
            self.join(_DRAIN_S)


class _Waiting:
    """A context in which this thread is known to wait for a result."""

    def __init__(self, changed: threading.Condition, waiters: list[threading.Thread]):
        self._changed, self._waiters = changed, waiters

    def __enter__(self) -> None:
        with self._changed:
            self._waiters.append(threading.current_thread())
            self._changed.notify()

    def __exit__(self, *_error: object) -> None:
        with self._changed:
            self._waiters.remove(threading.current_thread())
