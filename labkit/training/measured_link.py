"""The link between the ranks of this machine: alpha, beta and gamma, measured."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.comm.comm import Comm
from labkit.costs.link import Link, fit_link
from labkit.gpus import synchronize
from labkit.runtime.launch import run
from labkit.units import check_choice, check_integer, format_bytes, format_count

PATTERNS = {"ping_pong": "ping-pong", "exchange": "exchange"}
MESSAGE_BYTES = tuple(2**power for power in (10, 12, 14, 16, 18, 20, 22, 24))
ADDED_BYTES = 4 * 2**20
# Small messages are timed several in a row, as clocks and barriers have a price, too.
_MOST_IN_A_ROW = 16
_BYTES_IN_A_ROW = 2**22


@dataclass(frozen=True, kw_only=True)
class MeasuredLink(Link):
    """A link that was measured; it prints as a line that says how.

    Attributes:
        pattern: ``ping_pong`` or ``exchange``.
        world_size: P, the number of ranks that sent at the same time.
        transport: what moved the bytes: ``shared memory``, ``gloo``, ...
        seconds: {size in bytes: [seconds of a message, by repeat]}.
        added_s: by repeat, seconds to add 4 MiB on all ranks at once; empty if not measured.
    """

    pattern: str
    world_size: int
    transport: str
    seconds: dict[int, list[float]] = field(repr=False, compare=False)
    added_s: list[float] = field(repr=False, compare=False)

    def __str__(self) -> str:
        sizes = f"{format_bytes(min(self.seconds))} to {format_bytes(max(self.seconds))}"
        repeats = format_count(len(self.seconds[min(self.seconds)]), "repeat")
        ranks = "between" if self.pattern == "ping_pong" else "of"
        return (
            f"{super().__str__()} ({PATTERNS[self.pattern]} {ranks} {self.world_size} ranks, "
            f"medians of {repeats}, {sizes}, transport: {self.transport})"
        )


def measure_link(
    world_size: int = 2,
    pattern: str = "ping_pong",
    *,
    device: str = "auto",
    devices: str | Sequence[str] | None = None,
    transport: str = "auto",
    sizes_bytes: tuple[int, ...] = MESSAGE_BYTES,
    repeats: int = 11,
    gamma: bool = False,
) -> MeasuredLink:
    """Measure what a message between ranks of this machine costs: alpha + beta x bytes.

    In each repeat every size has its turn, so that a disturbance of some milliseconds spoils one
    repeat of each size, not all repeats of one. The line is fitted to the medians.

    Args:
        world_size: P. All ranks send at the same time: with more ranks than cores a message
            takes longer, and the figures hold for this P only.
        pattern: ``ping_pong`` sends a message from one rank to another and back, and takes half
            of the time; it needs P = 2. ``exchange`` is a step of a ring: each rank sends to the
            right while it receives from the left; its time is that of the slowest rank.
        device, devices, transport: see ``labkit.run``.
        sizes_bytes: the sizes of the messages, at least two.
        repeats: counted turns of each size.
        gamma: also measure gamma, the seconds to add a byte, on all ranks at once.

    Raises:
        ValueError: an unknown pattern, a ping-pong of other than 2 ranks, fewer than two sizes.
    """
    check_choice("pattern", pattern, PATTERNS)
    check_integer("repeats", repeats)
    for size in sizes_bytes:
        check_integer("a size in bytes", size)
    if len(set(sizes_bytes)) < 2:
        raise ValueError(f"a line needs two different sizes, got {sorted(set(sizes_bytes))}")
    if world_size == 1:
        raise ValueError("one rank has no link: measure 2 ranks or more")
    if world_size != 2 and pattern == "ping_pong":
        raise ValueError(f"a ping-pong has 2 ranks, not {world_size}: take pattern='exchange'")
    where = {"device": device, "devices": devices, "transport": transport}
    settings = pattern, tuple(sizes_bytes), repeats, gamma
    by_rank = run(_measure, *settings, world_size=world_size, **where).values
    moved_by = by_rank[0][0]
    # Of a ping-pong only rank 0 sees whole rounds, from its send to the answer.
    timed = [seconds for _, seconds, _ in by_rank[: 1 if pattern == "ping_pong" else None]]
    # A message takes as long as on the slowest rank.
    seconds = {size: [*map(max, zip(*(one[size] for one in timed)))] for size in timed[0]}
    added_s = [*map(max, zip(*(added_s for *_, added_s in by_rank)))]
    sizes_bytes, times_s = zip(*[(size, s) for size, times in seconds.items() for s in times])
    gamma_s_per_byte = statistics.median(added_s) / ADDED_BYTES if added_s else 0.0
    line = fit_link(sizes_bytes, times_s, gamma_s_per_byte)
    how = {"pattern": pattern, "world_size": world_size, "transport": moved_by}
    return MeasuredLink(**asdict(line), **how, seconds=seconds, added_s=added_s)


def _measure(
    comm: Comm, pattern: str, sizes_bytes: tuple[int, ...], repeats: int, gamma: bool
) -> tuple[str, dict[int, list[float]], list[float]]:
    """What moved the messages, this rank's seconds of one by size, and those of additions."""
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size

    def move(outgoing: Tensor, incoming: Tensor) -> None:
        if pattern == "exchange":
            comm.exchange(outgoing, right, incoming, left)
        elif comm.rank == 0:
            comm.send(outgoing, 1)
            comm.recv(incoming, 1)
        else:
            comm.recv(incoming, 0)
            comm.send(outgoing, 0)

    def timed(times: int, action: Callable[[], object]) -> float:
        """This rank's seconds per ``action``, several in a row after a barrier."""
        comm.barrier()
        # On NCCL a barrier is queued like any other message, and its call may return before it.
        synchronize(comm.device)
        start_s = time.perf_counter()
        for _ in range(times):
            action()
        synchronize(comm.device)
        return (time.perf_counter() - start_s) / times

    outgoing = {n: torch.ones(n, dtype=torch.uint8, device=comm.device) for n in sizes_bytes}
    incoming = {size: torch.zeros_like(tensor) for size, tensor in outgoing.items()}
    total = torch.zeros(ADDED_BYTES // 4, device=comm.device)
    add = partial(total.add_, torch.ones_like(total))
    backend = dist.get_backend().replace("nccl", "NCCL")
    moved_by = "shared memory" if comm.transport.shares_memory else backend
    seconds: dict[int, list[float]] = {size: [] for size in sizes_bytes}
    added_s = []
    for _ in range(repeats + 1):
        for size, times in seconds.items():
            in_a_row = max(1, min(_MOST_IN_A_ROW, _BYTES_IN_A_ROW // size))
            action = partial(move, outgoing[size], incoming[size])
            times.append(timed(in_a_row, action) / (1 if pattern == "exchange" else 2))
        if gamma:
            added_s.append(timed(1, add))
    # The first round warms up.
    return moved_by, {size: times[1:] for size, times in seconds.items()}, added_s[1:]
