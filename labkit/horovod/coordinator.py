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
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

JOIN = "join"
FUSION_BYTES = 64 * 2**20
# All ranks wait, and none has submitted anything: after this time none will.
STUCK_S = 3.0
# Kinds whose tensors may differ in their first dimension.
BY_ROWS = ("allgather", "alltoall")


@dataclass(frozen=True)
class Request:
    """What one rank wants done under a name; it travels as JSON.

    Attributes:
        name: by which the ranks agree.
        kind: ``allreduce``, ``allgather``, ``broadcast``, ``alltoall``, ``reducescatter``,
            ``barrier`` or ``join``.
        dtypes, shapes: of its tensors, one or (a group) several.
        op: of ``Reduction``, for allreduce and reducescatter.
        prescale, postscale: factors before and after the reduction.
        root: of a broadcast.
        splits: the rows for each rank, of an alltoall.
        has_value: whether this rank has a value for an allreduce. Otherwise it contributes zeros;
            if no rank has one, the result is None.
    """

    name: str
    kind: str
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    op: str = ""
    prescale: float = 1.0
    postscale: float = 1.0
    root: int | None = None
    splits: list[int] = field(default_factory=list)
    has_value: bool = True

    @classmethod
    def of(cls, name: str, kind: str, tensors: Sequence[Tensor] = (), **more: Any) -> "Request":
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        return cls(name, kind, dtypes, [list(tensor.shape) for tensor in tensors], **more)

    def common(self) -> tuple[Any, ...]:
        """What has to be equal on all ranks."""
        shapes = [shape[1:] if self.kind in BY_ROWS else shape for shape in self.shapes]
        scales = self.prescale, self.postscale
        return self.kind, self.dtypes, shapes, self.op, scales, self.root

    def described(self) -> str:
        """``allreduce float32 [2, 3] (sum)``, for example."""
        words = [self.kind, *(f"{d} {s}" for d, s in zip(self.dtypes[:4], self.shapes))]
        words += [f"({self.op})"] if self.op else []
        words += [f"from rank {self.root}"] if self.root is not None else []
        if (self.prescale, self.postscale) != (1.0, 1.0):
            words.append(f"times {self.prescale:g} before and {self.postscale:g} after")
        return " ".join(words)


@dataclass(frozen=True)
class Decision:
    """What all ranks carry out together.

    Attributes:
        requests: one, or several all-reduces that are fused.
        error: why they cannot; empty if they can.
        rows: by rank, how many rows each tensor of an allgather has, or the splits of an alltoall.
        last: of a join, the rank that came last.
    """

    requests: list[Request]
    error: str = ""
    rows: list[list[int]] = field(default_factory=list)
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
        decided = [_agreed(self._table.pop(name), joined, self._world_size) for name in ready]
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
            missing = [rank for rank in range(self._world_size) if rank not in of]
            lines.append(
                f"  {next(iter(of.values())).described()} {name!r}: submitted by {_ranks(of)}, "
                f"not by {_ranks(missing)}"
            )
        lines.append("Next step: submit the same names on all ranks, without a name in one order.")
        return "\n".join(lines)


def _agreed(of: Mapping[int, Request], joined: Sequence[int], world_size: int) -> Decision:
    """What to do about a name that all ranks have submitted but those that have joined."""
    first = next(iter(of.values()))
    if first.kind == JOIN:
        return Decision([first], last=joined[-1])
    if any(one.common() != first.common() for one in of.values()):
        lines = [f"the ranks do not agree on {first.name!r}:"]
        lines += [f"  rank {rank} has {of[rank].described()}" for rank in sorted(of)]
        lines.append("Next step: give all ranks the same, or use another name for each.")
        return Decision([first], "\n".join(lines))
    gone = sorted(set(joined) - of.keys())
    # The zeros of a rank that has joined change nothing in a sum.
    if gone and (first.kind != "allreduce" or first.op not in ("sum", "mean")):
        return Decision(
            [first],
            f"{first.described()} {first.name!r} needs something from every rank, and "
            f"{_ranks(gone)} called join(): from then on only sums and averages are possible",
        )
    if first.kind in BY_ROWS:
        rows = [of[rank].splits or [s[0] for s in of[rank].shapes] for rank in range(world_size)]
        return Decision([first], rows=rows)
    return Decision([replace(first, has_value=any(one.has_value for one in of.values()))])


def fuse(decided: Sequence[Decision], most_bytes: int) -> list[Decision]:
    """Put all-reduces of one reduction together while they have at most ``most_bytes``."""
    fused: list[Decision] = []
    # By reduction: the latest decision in ``fused``, and its bytes.
    latest: dict[tuple[Any, ...], tuple[Decision, int]] = {}
    for one in decided:
        request = one.requests[0]
        if one.error or request.kind != "allreduce":
            fused.append(one)
            continue
        num_bytes = sum(
            getattr(torch, d).itemsize * math.prod(s)
            for d, s in zip(request.dtypes, request.shapes)
        )
        key = request.op, request.prescale, request.postscale
        into, before = latest.get(key, (None, 0))
        if into is not None and before + num_bytes <= most_bytes:
            into.requests.append(request)
            latest[key] = into, before + num_bytes
        else:
            fused.append(one)
            latest[key] = one, num_bytes
    return fused


def _ranks(ranks: Iterable[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))
