"""What a caller holds of a negotiated collective: it waits here, and gets the result."""

import itertools
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from labkit.collectives.requests import Request
from labkit.comm.source_lines import caller_location

# After so long a wait is worth a word on stderr.
STALL_S = 60.0


class Handle:
    """One submitted collective.

    Args:
        engine: the thread that carries it out, a ``Negotiator``.
        request: what is wanted.
        tensors: of this rank.
        take: makes what ``wait`` returns from the list of results.
    """

    def __init__(
        self,
        engine: Any,
        request: Request,
        tensors: Sequence[Tensor],
        take: Callable[[Any], Any],
    ):
        self.request, self.tensors, self._engine, self._take = request, tensors, engine, take
        self.location = caller_location()
        # On a GPU the values are there when its stream has come to this point.
        devices = {tensor.device for tensor in tensors if tensor.device.type == "cuda"}
        self._ready = [torch.cuda.current_stream(device).record_event() for device in devices]
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
                while not self._done.wait(STALL_S):
                    print(f"labkit: {self._engine.why_late(self)}", file=sys.stderr, flush=True)
        if self._error is not None:
            raise self._error
        return self._take(self._result)

    def is_done(self) -> bool:
        return self._done.is_set()

    # Called by the thread

    def values(self) -> list[Tensor] | None:
        """The tensors on the CPU; None if this rank contributes zeros."""
        for event in self._ready:
            event.synchronize()
        return [t.detach().cpu() for t in self.tensors] if self.request.has_value else None

    def finish(self, result: Any, error: BaseException | None = None) -> None:
        """Let ``wait`` return ``result``: tensors move to the devices that theirs are on."""
        try:
            if isinstance(result, list):
                result = self._delivered(result)
        except Exception as raised:
            error = raised
        self._result, self._error = result, error
        self._done.set()

    def _delivered(self, results: list[Tensor]) -> list[Tensor]:
        if self.request.in_place:
            for tensor, result in zip(self.tensors, results):
                tensor.detach().copy_(result)
            results = list(self.tensors)
        else:
            # A part of a buffer would keep all of it in memory.
            is_part = [one.untyped_storage().nbytes() > one.nbytes for one in results]
            results = [one.clone() if part else one for one, part in zip(results, is_part)]
            # (An alltoall has one tensor and two results.)
            targets = itertools.chain(self.tensors, self.tensors)
            results = [one.to(tensor.device) for one, tensor in zip(results, targets)]
        for device in {one.device for one in results if one.device.type == "cuda"}:
            torch.cuda.current_stream(device).synchronize()
        return results
