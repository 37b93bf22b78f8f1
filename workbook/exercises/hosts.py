"""Page 14: all-reduce over several hosts, in two pieces, and local SGD.

The ranks of one machine play the ranks of several hosts: what counts is which of them send to
each other. Hosts have different numbers of ranks, and ranks are numbered host by host.

Symbols: P ranks on H hosts, S bytes of a rank's tensor.
"""

import itertools
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from labkit.collectives import hierarchical_all_reduce
from labkit.collectives.ring import split_chunks
from labkit.costs import card_bytes
from labkit.costs.traffic import ring_all_reduce_cost
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.emulated_link import EmulatedLink
from labkit.units import format_bytes
from workbook.exercises.grader import Case, Check, Target
from workbook.exercises.grader.exercise import DRAWN, Found, Ranks, same_bits

Hosts = tuple[tuple[int, ...], ...]

# P -> the number of ranks on each host.
_RANKS = {4: (2, 2), 5: (3, 2), 6: (1, 3, 2)}


_check = partial(
    Check,
    world_sizes=tuple(_RANKS),
    # Divisible by 1, 2 and 3 parts of 2 and 3 pieces, and large beside the rounding of the others.
    sizes=(240, 50, 7, 1, 0),
    drawn_size=DRAWN,
    special=lambda case: f"hosts of {' + '.join(map(str, _RANKS[case.world_size]))} ranks",
)
# The card of each host in a run that is drawn: 1 MB takes 25 ms.
_CARD = EmulatedLink(0.001, 40e6, ranks_per_host=2)


def hosts_of(case: Case) -> Hosts:
    """The ranks of each host."""
    ends = [0, *itertools.accumulate(_RANKS[case.world_size])]
    return tuple(tuple(range(*edges)) for edges in itertools.pairwise(ends))


def _host(rank: int, case: Case) -> tuple[int, ...]:
    return next(host for host in hosts_of(case) if rank in host)


def _chunks(rank: int, case: Case) -> list[Tensor]:
    return split_chunks(case.tensor(rank), min(_RANKS[case.world_size]))


def _kept(rank: int, case: Case) -> list[Tensor | None]:
    """The host's sum of the chunk that ``rank`` keeps; None for the others."""
    host = _host(rank, case)
    sums = split_chunks(case.total(host), min(_RANKS[case.world_size]))
    return [chunk if owner == rank else None for owner, chunk in zip(host, sums)]


def _to_its_host(rank: int, case: Case) -> Target:
    host = _host(rank, case)
    num_bytes = [4 * len(c) for owner, c in zip(host, _chunks(rank, case)) if owner != rank]
    return Target(len(num_bytes), sum(num_bytes), peers=frozenset(host) - {rank})


# There are as many chunks as the smallest host has ranks. Target per rank: one message for each
# chunk that it does not keep, to a rank of its own host.
inside = _check(
    "hosts.inside",
    _kept,
    signature="comm, chunks, host",
    inputs=lambda rank, case: (_chunks(rank, case), _host(rank, case)),
    chunked=True,
    target=_to_its_host,
)


def _leaves_too_much(case: Case, ranks: Ranks) -> Found:
    hosts = hosts_of(case)
    # Ranks may cut a tensor into up to P pieces before the ring of hosts cuts them into H.
    slack = 4 * 2 * (len(hosts) - 1) * case.world_size
    for number, target in enumerate(card_bytes("hierarchical", case.size, 4, hosts)):
        leaving = 0
        for rank in hosts[number]:
            for peer, num_bytes in ranks[rank].bytes_to.items():
                if peer not in hosts[number]:
                    leaving += num_bytes
        if leaving > target + slack:
            text = f"{format_bytes(leaving)} leave host {number} by its card, where the target is "
            return f"{text}{format_bytes(target)}: add up inside each host first"
    return same_bits(case, ranks)


def _by_labkit(comm: Comm, tensor: Tensor, hosts: Hosts) -> None:
    comm.hosts = hosts
    hierarchical_all_reduce(comm, tensor)


# Target: 2 (H - 1) / H x S bytes leave each host; inside, all traffic is fine.
all_reduce = _check(
    "hosts.all_reduce",
    lambda rank, case: case.total(),
    signature="comm, tensor, hosts",
    inputs=lambda rank, case: (case.tensor(rank), hosts_of(case)),
    chunked=True,
    rule=_leaves_too_much,
    stuck={"240 elements.*does not fit": "each host needs as many chunks as the others"},
    library=_by_labkit,
    link=_CARD,
)

LR = 0.1


def _plan(case: Case) -> tuple[int, int]:
    """Steps, and after how many of them the weights are averaged.

    In a first call they divide evenly, in a second one some are left, or there are fewer.
    """
    interval = case.integer(2, 2, 4)
    if case.call == 0:
        return 2 * interval, interval
    return interval * case.integer(1, 0, 2) + case.integer(3, 1, interval - 1), interval


def _start(case: Case) -> Tensor:
    """The same weights on all ranks; float64, so that steps in another order round alike."""
    return case.tensor(case.world_size).double()


def _gradient_of(rank: int, case: Case) -> Callable[[Tensor, int], Tensor]:
    """A loss that is curved differently on each rank, and has another minimum in each step."""
    pulls = [5 * case.random(100 * rank + s, case.size).double() for s in range(_plan(case)[0])]
    return lambda weight, step: (rank + 1) * weight - pulls[step]


def _trained(case: Case, rank: int, at_end: bool = True, interval: int = 0) -> Tensor:
    """The rank's weights at the end, with a mean after each ``interval`` of steps."""
    steps, usual_interval = _plan(case)
    interval = interval or usual_interval
    weights = [_start(case)] * case.world_size
    for step in range(steps):
        weights = [w - LR * _gradient_of(r, case)(w, step) for r, w in enumerate(weights)]
        if (step + 1) % interval == 0 or (at_end and step + 1 == steps):
            mean = torch.stack(weights).mean(0)
            weights = [mean] * case.world_size
    return weights[rank]


def _train(
    fn: Callable, comm: Comm, weight: Tensor, gradient_of: Callable, steps: int, interval: int
) -> None:
    def computed(weight: Tensor, step: int) -> Tensor:
        with comm.span("compute"):
            return gradient_of(weight, step)

    fn(comm, weight, computed, steps, interval)


def _an_all_reduce_per_average(rank: int, case: Case) -> Target:
    cost = ring_all_reduce_cost(case.size, 8, case.world_size, rank)
    steps, interval = _plan(case)
    averages = -(-steps // interval)
    return Target(averages * cost.messages, averages * cost.num_bytes)


# ``steps`` updates of SGD by this rank's own gradients. Target: one ring all-reduce of the weights
# after each ``every`` of them, and one at the end for those that are left.
local_sgd = Check(
    "hosts.local_sgd",
    lambda rank, case: _trained(case, rank),
    signature="comm, weight, gradient_of, steps, every",
    inputs=lambda rank, case: (_start(case), _gradient_of(rank, case), *_plan(case)),
    call=_train,
    parts=lambda case: {
        f"what rank {r} trains alone": _trained(case, r, interval=100, at_end=False)
        for r in range(case.world_size)
    },
    rule=same_bits,
    target=_an_all_reduce_per_average,
    special=lambda case: "{} steps, an average every {}".format(*_plan(case)),
    link=_CARD,
)
