"""The speed of this machine: messages (alpha, beta), additions (gamma), and the limit.

The limit of an all-reduce is set by the memory that the ranks share; where each rank has a GPU of
its own, by the links between the GPUs.

Symbols: P ranks, S bytes of one rank's tensor.
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from labkit.comm.comm import Comm
from labkit.costs.link import Link, fit_link
from labkit.units import format_number
from workbook.measure.turns import take_turns, timed

MESSAGE_BYTES = tuple(2**power for power in (10, 12, 14, 16, 18, 20, 22, 24))
# Several messages in a row, as in a collective, share the cost of leaving the barrier.
MESSAGES_IN_A_ROW = 4
_MEMORY_BYTES = 64 * 2**20
# More repeats would not help, since only their medians are used.
_MOST_REPEATS = 10
# Seconds to measure each size of message, and to measure the memory.
_BUDGET_S = 1.5

# {size in bytes: {transport, or "add": [seconds of each repeat]}}
MessageSeconds = dict[int, dict[str, list[float]]]


def measure_messages(comm: Comm, transports: dict[str, Comm], repeats: int) -> MessageSeconds:
    """Time one step of a ring at several sizes: every rank sends right and receives from the left.

    All ranks send at the same time: they share cores and memory bandwidth, so the fit holds for
    this P only.

    Args:
        comm: this rank's Comm, for barriers.
        transports: by name, the Comm whose ``exchange`` is timed.
        repeats: at most, and never more than ten.

    Returns:
        This rank's seconds, by size and transport; under ``add``, those of adding two tensors of
        that size.
    """
    right, left = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    found = {}
    for size in MESSAGE_BYTES:
        outgoing = torch.ones(size // 4, device=comm.device)
        incoming = torch.zeros_like(outgoing)
        actions: dict[str, Callable[[], object]] = {
            name: partial(transport.exchange, outgoing, right, incoming, left)
            for name, transport in transports.items()
        }
        actions["add"] = partial(incoming.add_, outgoing)
        turns = {name: partial(_timed_in_a_row, comm, action) for name, action in actions.items()}
        found[size] = take_turns(comm, turns, min(repeats, _MOST_REPEATS), _BUDGET_S)
    return found


def _timed_in_a_row(comm: Comm, action: Callable[[], object]) -> float:
    def several() -> None:
        for _ in range(MESSAGES_IN_A_ROW):
            action()

    return timed(comm, several) / MESSAGES_IN_A_ROW


def fit_links(seconds: MessageSeconds) -> dict[str, Link]:
    """Fit alpha and beta to the messages of each transport; gamma is the beta of additions."""
    *transports, _ = next(iter(seconds.values()))
    gamma = _fit(seconds, "add").beta_s_per_byte
    return {name: _fit(seconds, name, gamma) for name in transports}


def _fit(seconds: MessageSeconds, name: str, gamma_s_per_byte: float = 0.0) -> Link:
    points = [(size, one) for size, by_name in seconds.items() for one in by_name[name]]
    sizes_bytes, times_s = zip(*points)
    return fit_link(sizes_bytes, times_s, gamma_s_per_byte)


def measure_memory(comm: Comm, repeats: int) -> dict[str, list[float]]:
    """Time a copy and an addition of 64 MiB on all ranks at once; see ``Memory``."""
    source = torch.ones(_MEMORY_BYTES // 4, device=comm.device)
    target = torch.ones_like(source)
    actions = {"copy": target.copy_, "add": target.add_}
    turns = {name: partial(timed, comm, partial(act, source)) for name, act in actions.items()}
    return take_turns(comm, turns, min(repeats, _MOST_REPEATS), _BUDGET_S)


@dataclass(frozen=True)
class Memory:
    """The memory bandwidth of all P ranks together, and the limit that it sets to an all-reduce.

    Attributes:
        copy_bytes_per_s: of a copy, in which each rank reads 64 MiB and writes 64 MiB.
        add_bytes_per_s: of ``target += source``, in which each rank reads twice 64 MiB and writes
            64 MiB.

    The limit: a ring in place has to read each rank's S bytes once, since they are in ordinary
    memory that no other rank sees, and to write the S bytes of the result once. Everything that
    ranks send to each other can stay in the cache. So 2 P S bytes go through memory, which takes
    ``seconds(S)`` at the higher of the two bandwidths above. A tensor that fits into the cache
    can be faster.
    """

    world_size: int
    copy_bytes_per_s: float
    add_bytes_per_s: float

    @classmethod
    def of(cls, seconds: dict[str, list[float]], world_size: int) -> "Memory":
        """Build it from the slowest rank's seconds of ``measure_memory``."""
        in_all = world_size * _MEMORY_BYTES
        copy_s, add_s = (statistics.median(seconds[name]) for name in ("copy", "add"))
        return cls(world_size, 2 * in_all / copy_s, 3 * in_all / add_s)

    def seconds(self, num_bytes: int) -> float:
        """The least time of an all-reduce of S = ``num_bytes``, as far as memory limits it."""
        best = max(self.copy_bytes_per_s, self.add_bytes_per_s)
        return 2 * self.world_size * num_bytes / best

    def text(self) -> str:
        """The limit in words."""
        copy, add = self.copy_bytes_per_s / 1e9, self.add_bytes_per_s / 1e9
        return (
            f"The limit: each rank reads S and writes S, at the speed of {self.world_size} ranks "
            f"at once\n(copy {format_number(copy)} GB/s, add {format_number(add)} GB/s, of "
            "64 MiB each); a tensor that stays in the cache can beat it."
        )


@dataclass(frozen=True)
class Links:
    """The links between GPUs, one for each of P ranks, and the limit that they set.

    Attributes:
        bytes_per_s: of copies from each GPU to the next, all at the same time, the slowest.

    The limit: a ring sends 2 (P - 1) / P x S bytes over each link, and no all-reduce sends less
    from the rank that sends the most (Patarasuk and Yuan 2009).
    """

    world_size: int
    bytes_per_s: float

    def seconds(self, num_bytes: int) -> float:
        """The least time of an all-reduce of S = ``num_bytes``, as far as the links limit it."""
        return 2 * (self.world_size - 1) / self.world_size * num_bytes / self.bytes_per_s

    def text(self) -> str:
        """The limit in words."""
        speed = format_number(self.bytes_per_s / 1e9)
        return (
            "The limit: 2 (P - 1) / P x S bytes over the link from each GPU to the next, at the "
            f"speed\nof plain copies of 64 MiB over all of them at once, the slowest: {speed} "
            "GB/s (CUDA events)."
        )
