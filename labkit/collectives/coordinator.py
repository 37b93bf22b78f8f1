"""The coordinator of negotiated collectives: rank 0, which hears what every rank has submitted.

Symbols: P ranks.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from labkit.collectives.requests import BY_ROWS, JOIN, Decision, Request, dtype_of

FUSION_BYTES = 64 * 2**20
# All ranks wait, and none has submitted anything: after so long none will.
_STUCK_S = 3.0
# Zeros of a rank that has joined, or has no value, change nothing here.
_SUMS = ("sum", "mean")


class Coordinator:
    """What ranks have submitted and not carried out yet, by name and rank."""

    def __init__(self, world_size: int):
        self._world_size = world_size
        self._table: dict[str, dict[int, Request]] = {}
        self._quiet_since_s: float | None = None

    def decide(self, everyone: Sequence[Mapping[str, Any]]) -> list[Decision]:
        """Take what the ranks say in one cycle, and return what all of them carry out, in order.

        Args:
            everyone: by rank: what is ``new``, and whether the rank ``waits`` and submits no more.
        """
        for rank, told in enumerate(everyone):
            for packed in told["new"]:
                request = Request(*packed)
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
        is_quiet = all(told["waits"] and not told["new"] for told in everyone)
        now_s = time.monotonic()
        self._quiet_since_s = (self._quiet_since_s or now_s) if is_quiet else None
        return is_quiet and now_s - (self._quiet_since_s or now_s) > _STUCK_S

    def _explained(self) -> str:
        lines = ["deadlock: all ranks wait, each for something that others have not submitted:"]
        for name, of in self._table.items():
            missing = [rank for rank in range(self._world_size) if rank not in of]
            lines.append(
                f"  {next(iter(of.values())).described()} {name!r}: submitted by {named(of)}, "
                f"not by {named(missing)}"
            )
        lines.append(
            "Next step: submit the same names on all ranks. What has no name is numbered by kind, "
            "in the order of the calls."
        )
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
    if gone and (first.kind != "allreduce" or first.op not in _SUMS):
        return Decision(
            [first],
            f"{first.described()} {first.name!r} needs something from every rank, and "
            f"{named(gone)} called join(): from then on only sums and averages are possible",
        )
    if first.kind in BY_ROWS:
        rows = [of[rank].splits or [s[0] for s in of[rank].shapes] for rank in range(world_size)]
        return Decision([first], rows=rows)
    return Decision([replace(first, has_value=any(one.has_value for one in of.values()))])


def fuse(decided: Sequence[Decision], most_bytes: int) -> list[Decision]:
    """Put all-reduces of one reduction together while they have at most ``most_bytes``."""
    fused = list[Decision]()
    # By reduction: the latest decision in ``fused``, and its bytes.
    open_ones = dict[tuple[Any, ...], tuple[Decision, int]]()
    for one in decided:
        request = one.requests[0]
        if one.error or request.kind != "allreduce":
            fused.append(one)
            continue
        sizes = (
            dtype_of(d).itemsize * math.prod(s) for d, s in zip(request.dtypes, request.shapes)
        )
        num_bytes, key = sum(sizes), (request.op, request.prescale, request.postscale)
        latest, held = open_ones.get(key, (None, 0))
        if latest is not None and held + num_bytes <= most_bytes:
            latest.requests.append(request)
            open_ones[key] = latest, held + num_bytes
        else:
            fused.append(one)
            open_ones[key] = one, num_bytes
    return fused


def named(ranks: Any) -> str:
    """``rank 0, rank 2``, for example."""
    return ", ".join(f"rank {rank}" for rank in sorted(ranks))
