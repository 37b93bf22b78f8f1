"""The coordinator of negotiated collectives: rank 0, which hears what every rank has submitted.

During backward one rank may finish gradient "a" first, and another gradient "b". If each began a
ring for its own, neither would end. So nothing begins before all ranks have it, and all carry out
the same list in the same order, which rank 0 makes.

Symbols: P ranks. Source: Sergeev and Del Balso, "Horovod: fast and easy distributed deep learning
in TensorFlow" (2018), sections 3 and 4, and Horovod's documentation, "Tensor Fusion".
"""

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

JOIN = "join"
FUSION_BYTES = 64 * 2**20
# All ranks wait, and none has submitted anything: after this time none will.
STUCK_S = 3.0
# Kinds whose tensors may differ in their first dimension.
BY_ROWS = ("allgather", "alltoall")


class Request(NamedTuple):
    """What one rank wants done under a name; it travels as JSON.

    Attributes:
        name: by which the ranks agree.
        kind: ``allreduce``, ``allgather``, ``broadcast``, ``alltoall``, ``reducescatter``,
            ``barrier`` or ``join``.
        option: of a reduction the operation of ``Reduction``, of a broadcast the root.
        dtype, shape: of its tensor; of an allgather or alltoall without the first dimension.
        rows: the first dimension of an allgather, and of an alltoall the rows for each rank: they
            alone may differ.
    """

    name: str
    kind: str
    option: str = ""
    dtype: str = ""
    shape: Sequence[int] = ()
    rows: int | Sequence[int] = 0

    def described(self) -> str:
        """``allreduce sum float32 [2, 3]``, for example."""
        return f"{self.kind} {self.option} {self.dtype} {list(self.shape)}"


class Decision(NamedTuple):
    """What all ranks carry out together.

    Attributes:
        requests: one, or several all-reduces that are fused.
        error: why they cannot; empty if they can.
        rows: by rank, the ``rows`` of its request.
        last: of a join, the rank that came last.
    """

    requests: list[Request]
    error: str = ""
    rows: Sequence[Any] = ()
    last: int = 0


class Coordinator:
    """What ranks have submitted and not carried out yet, by name and rank."""

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._table: dict[str, dict[int, Request]] = {}
        self._quiet_since_s: float | None = None

    def decide(self, everyone: Sequence[Mapping[str, Any]]) -> list[Decision]:
        """Take the ranks' messages of one cycle, and return what all of them carry out, in order.

        Args:
            everyone: by rank: the ``new`` requests, and whether the rank ``waits`` and submits no
                more.
        """
        for rank, message in enumerate(everyone):
            for values in message["new"]:
                request = Request(*values)
                self._table.setdefault(request.name, {})[rank] = request
        joined = list(self._table.get(JOIN, {}))
        ready = [n for n, of in self._table.items() if len({*of, *joined}) == self._world_size]
        if len(joined) < self._world_size or len(self._table) > 1:
            # The ranks that joined first are needed for all that is left.
            ready = [name for name in ready if name != JOIN]
        decided = [_agreed(self._table.pop(name), joined) for name in ready]
        if not decided and self._are_stuck(everyone):
            why = self._explained()
            decided = [Decision([next(iter(of.values()))], why) for of in self._table.values()]
            self._table.clear()
        return fuse(decided, FUSION_BYTES)

    def _are_stuck(self, everyone: Sequence[Mapping[str, Any]]) -> bool:
        is_quiet = all(message["waits"] and not message["new"] for message in everyone)
        now_s = time.monotonic()
        self._quiet_since_s = (self._quiet_since_s or now_s) if is_quiet else None
        return is_quiet and now_s - (self._quiet_since_s or now_s) > STUCK_S

    def _explained(self) -> str:
        lines = ["deadlock: all ranks wait, each for something that others have not submitted:"]
        for name, of in self._table.items():
            missing = set(range(self._world_size)) - of.keys()
            lines.append(
                f"  {next(iter(of.values())).described()} {name!r}: submitted by {_ranks(of)}, "
                f"not by {_ranks(missing)}"
            )
        lines.append("Next step: submit the same names on all ranks, without a name in one order.")
        return "\n".join(lines)


def _agreed(of: Mapping[int, Request], joined: Sequence[int]) -> Decision:
    """What to do about a name that all ranks have submitted but those that have joined."""
    first = next(iter(of.values()))
    if first.kind == JOIN:
        return Decision([first], last=joined[-1])
    if len({one.described() for one in of.values()}) > 1:
        lines = [f"the ranks do not agree on {first.name!r}:"]
        lines += [f"  rank {rank} has {of[rank].described()}" for rank in sorted(of)]
        lines.append("Next step: give all ranks the same, or use another name for each.")
        return Decision([first], "\n".join(lines))
    gone = set(joined) - of.keys()
    # The zeros of a rank that has joined change nothing in a sum.
    if gone and (first.kind != "allreduce" or first.option not in ("sum", "mean")):
        return Decision(
            [first],
            f"{first.described()} {first.name!r} needs something from every rank, and "
            f"{_ranks(gone)} called join(): from then on only sums and averages are possible",
        )
    return Decision([first], rows=[of[rank].rows for rank in sorted(of)])


def fuse(decided: Sequence[Decision], most_bytes: int) -> list[Decision]:
    """Put neighbouring all-reduces of one operation and dtype together: ``most_bytes`` at most."""
    fused: list[Decision] = []
    key, num_bytes = None, 0
    for one in decided:
        (request,) = one.requests
        mine = math.prod(request.shape) * getattr(torch, request.dtype or "bool").itemsize
        before, key = key, (request.kind == "allreduce", one.error, request.option, request.dtype)
        if key == before and key[:2] == (True, "") and num_bytes + mine <= most_bytes:
            fused[-1].requests.append(request)
            num_bytes += mine
        else:
            fused.append(one)
            num_bytes = mine
    return fused


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))
