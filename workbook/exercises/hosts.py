"""Checks of page 12: all-reduce over several hosts, in pieces, and the place of a process.

The ranks of one machine play the ranks of several hosts: what counts is which of them send to
each other. Hosts have different numbers of ranks, and ranks are numbered host by host.

Symbols: P ranks on H hosts, S bytes of a rank's tensor.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.collectives import hierarchical_all_reduce
from labkit.collectives.ring import split_chunks
from labkit.comm.comm import Comm
from labkit.comm.emulated_link import EmulatedLink
from labkit.costs.hosts import card_bytes
from labkit.schedules.ring import chunk_bounds
from workbook.exercises.grader import Case, Exercise, Target, Verdict, answers, grade
from workbook.exercises.grader.exercise import DRAWN, Cards
from workbook.exercises.ring import reduced, ring_target

Hosts = tuple[tuple[int, ...], ...]

# P -> the number of ranks on each host.
_RANKS = {4: (2, 2), 5: (3, 2), 6: (1, 3, 2)}
_WORDS = {P: f"hosts of {' + '.join(map(str, sizes))}" for P, sizes in _RANKS.items()}
_WORLD_SIZES = tuple(_RANKS)
# The card of each host in a run that is drawn: 1 MB takes 25 ms.
_LINK = EmulatedLink(0.001, 40e6, ranks_per_host=2)
# Divisible by 1, 2 and 3 parts of 2 and 3 pieces, and large beside the rounding of the others.
_SIZES = (240, 50, 7, 1, 0)


def inside(fn: Callable, *, world_sizes: tuple[int, ...] = _WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, chunks, host)``: the host's sum of chunk i on rank ``host[i]``, in place.

    There are as many chunks as the smallest host has ranks. Target per rank: one message for each
    chunk that it does not keep, to a rank of its own host.
    """
    exercise = Exercise(
        "hosts.inside",
        signature="comm, chunks, host",
        inputs=lambda rank, case: (_chunks(rank, case), _host(rank, case)),
        expected=lambda rank, case: _own_chunk_over(_host(rank, case), rank, case),
        chunked=True,
        mistakes={
            "hosts.over_all": lambda r, c: _own_chunk_over(range(c.world_size), r, c),
        },
        target=_inside_target,
        sizes=_SIZES,
        drawn_size=DRAWN,
        ranks_words=_WORDS,
    )
    return grade(fn, exercise, world_sizes)


def between(fn: Callable, *, world_sizes: tuple[int, ...] = _WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, chunk, peers)``: the sum over ``peers``, one rank per host, in place.

    It is called on these ranks only. Target per rank: the ring of H ranks, 2 (H - 1) messages of
    one piece of the chunk each, to others of ``peers``.
    """
    exercise = Exercise(
        "hosts.between",
        signature="comm, chunk, peers",
        inputs=lambda rank, case: (case.tensor(rank), _peers(rank, case)),
        expected=_sum_over_peers,
        call=_call_if_peer,
        target=_between_target,
        any_chunks=True,
        sizes=_SIZES,
        drawn_size=DRAWN,
        drawn_link=_LINK,
        ranks_words=_WORDS,
    )
    return grade(fn, exercise, world_sizes)


def all_reduce(fn: Callable, *, world_sizes: tuple[int, ...] = _WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor, hosts)``: the sum over all ranks in place, over several hosts.

    ``hosts`` are the ranks of each host. Target: 2 (H - 1) / H x S bytes leave each host. Inside
    of the hosts any traffic is right. The results must be equal to the bit.
    """
    exercise = Exercise(
        "hosts.all_reduce",
        signature="comm, tensor, hosts",
        inputs=lambda rank, case: (case.tensor(rank), hosts_of(case)),
        expected=lambda rank, case: reduced("sum", rank, case),
        cards=_cards,
        mistakes={"hosts.not_inside": _not_inside, "hosts.not_shared": _not_shared},
        same_bits=True,
        sizes=_SIZES,
        library=_labkits,
        drawn_size=DRAWN,
        drawn_link=_LINK,
        ranks_words=_WORDS,
    )
    return grade(fn, exercise, world_sizes)


def _labkits(comm: Comm, tensor: Tensor, hosts: Hosts) -> None:
    """labkit's own function, with the hosts of the exercise."""
    before = comm.hosts
    comm.hosts = hosts
    try:
        hierarchical_all_reduce(comm, tensor)
    finally:
        comm.hosts = before


def hosts_of(case: Case) -> Hosts:
    """The ranks of each host."""
    ends = [0, *itertools.accumulate(_RANKS[case.world_size])]
    return tuple(tuple(range(*edges)) for edges in itertools.pairwise(ends))


def _host(rank: int, case: Case) -> tuple[int, ...]:
    return next(host for host in hosts_of(case) if rank in host)


def _parts(case: Case) -> int:
    """Into how many chunks all hosts cut their tensors."""
    return min(map(len, hosts_of(case)))


def _chunks(rank: int, case: Case) -> list[Tensor]:
    return split_chunks(case.tensor(rank), _parts(case))


def _own_chunk_over(ranks: Iterable[int], rank: int, case: Case) -> list[Tensor | None]:
    """The sum over ``ranks`` of the chunk that ``rank`` keeps; None for the others."""
    host = _host(rank, case)
    sums = [_sum(chunks) for chunks in zip(*(_chunks(other, case) for other in ranks))]
    return [total if host[i] == rank else None for i, total in enumerate(sums)]


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).sum(0).float()


def _inside_target(rank: int, case: Case) -> Target:
    host = _host(rank, case)
    sizes = [end - start for start, end in chunk_bounds(case.size, _parts(case))]
    sent = [size for owner, size in zip(host, sizes) if owner != rank]
    return Target(len(sent), 4 * sum(sent), peers=frozenset(host) - {rank})


def _peers(rank: int, case: Case) -> tuple[int, ...]:
    """The ranks at this rank's place on each host; those of place 0 if not every host has it."""
    place = _host(rank, case).index(rank)
    return tuple(host[place if place < _parts(case) else 0] for host in hosts_of(case))


def _call_if_peer(fn: Callable, comm: Comm, chunk: Tensor, peers: tuple[int, ...]) -> Any:
    return fn(comm, chunk, peers) if comm.rank in peers else None


def _sum_over_peers(rank: int, case: Case) -> Tensor | None:
    peers = _peers(rank, case)
    return _sum(map(case.tensor, peers)) if rank in peers else None


def _between_target(rank: int, case: Case) -> Target:
    peers = _peers(rank, case)
    if rank not in peers:
        return Target(0, 0, peers=frozenset())
    ring = Case(len(peers), case.size)
    due = ring_target(case.size, 4, peers.index(rank), ring)
    return due._replace(peers=frozenset(peers) - {rank})


def _not_inside(rank: int, case: Case) -> Tensor:
    """The result if each chunk is summed between the hosts alone."""
    by_place = zip(*(host[: _parts(case)] for host in hosts_of(case)))
    return torch.cat(
        [_sum(_chunks(peer, case)[i] for peer in peers) for i, peers in enumerate(by_place)]
    )


def _not_shared(rank: int, case: Case) -> Tensor:
    """The result if nobody brings the complete chunks to the other ranks of the host."""
    complete = _own_chunk_over(range(case.world_size), rank, case)
    own = _chunks(rank, case)
    return torch.cat([mine if done is None else done for mine, done in zip(own, complete)])


def _cards(case: Case) -> Cards:
    hosts = hosts_of(case)
    both = (card_bytes(name, case.size, 4, hosts) for name in ("hierarchical", "ring"))
    return Cards(hosts, *both)


# The place of a process


def place(fn: Callable) -> Verdict:
    """Grade ``fn(environment)``: (rank, local rank, host) of a process of torchrun or of Slurm.

    ``environment`` is a dict of texts. Under Slurm the local rank and the host follow from
    SLURM_PROCID and SLURM_TASKS_PER_NODE. Under a torchrun that Slurm has started, torchrun's
    variables are right. Runs in this process.
    """
    return answers(
        fn,
        [((environment,), _place(environment)) for environment in _ENVIRONMENTS],
        name="hosts.place",
        signature="environment",
        mistakes={f"place.{key}": wrong for key, wrong in _WRONG_PLACES.items()},
    )


def _torchrun(rank: int, local_rank: int, host: int, **more: str) -> dict[str, str]:
    own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "GROUP_RANK": str(host)}
    return {"MASTER_ADDR": "node01", "MASTER_PORT": "29400", **own, **more}


def _slurm(rank: int, tasks: str) -> dict[str, str]:
    nodes = str(len(_tasks(tasks)))
    return {"SLURM_PROCID": str(rank), "SLURM_TASKS_PER_NODE": tasks, "SLURM_NNODES": nodes}


def _tasks(text: str) -> list[int]:
    """The tasks of each node: ``2(x3),1`` is [2, 2, 2, 1]."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]


def _place(environment: Mapping[str, str]) -> tuple[int, int, int]:
    if "RANK" in environment:
        rank, local_rank, host = (environment[n] for n in ("RANK", "LOCAL_RANK", "GROUP_RANK"))
        return int(rank), int(local_rank), int(host)
    return _by_tasks(int(environment["SLURM_PROCID"]), environment["SLURM_TASKS_PER_NODE"])


def _by_tasks(rank: int, tasks: str) -> tuple[int, int, int]:
    first = 0
    for host, count in enumerate(_tasks(tasks)):
        if rank < first + count:
            return rank, rank - first, host
        first += count
    raise AssertionError("a rank that no node has")


# Of torchrun with 4 and 2 processes on its nodes, alone and started by Slurm; of Slurm.
_ENVIRONMENTS = [
    _torchrun(5, 1, 1),
    _torchrun(3, 3, 0),
    _torchrun(4, 0, 1, **_slurm(1, "1(x2)")),
    *(_slurm(rank, "2,2") for rank in (0, 3)),
    *(_slurm(rank, "2(x3),1") for rank in (1, 4, 6)),
    *(_slurm(rank, "3,1(x2),4") for rank in (2, 3, 4, 5, 8)),
    _slurm(13, "12(x2)"),
]


def _even(environment: Mapping[str, str], count: Callable[[list[int]], int]) -> tuple:
    """As if all nodes had as many tasks as ``count`` says."""
    if "RANK" in environment:
        return _place(environment)
    rank, tasks = int(environment["SLURM_PROCID"]), _tasks(environment["SLURM_TASKS_PER_NODE"])
    return rank, rank % count(tasks), rank // count(tasks)


def _without_times(environment: Mapping[str, str]) -> tuple | None:
    """As if ``2(x3)`` were one node of 2 tasks: the ranks that are then on no node stay None."""
    if "RANK" in environment:
        return _place(environment)
    tasks = re.sub(r"\(x\d+\)", "", environment["SLURM_TASKS_PER_NODE"])
    rank = int(environment["SLURM_PROCID"])
    return _by_tasks(rank, tasks) if rank < sum(_tasks(tasks)) else None


_WRONG_PLACES: dict[str, Callable[[Mapping[str, str]], tuple | None]] = {
    "even_nodes": lambda env: _even(env, lambda tasks: tasks[0]),
    "mean_node": lambda env: _even(env, lambda tasks: max(1, sum(tasks) // len(tasks))),
    "times": _without_times,
    "slurm_first": lambda env: (
        _by_tasks(int(env["SLURM_PROCID"]), env["SLURM_TASKS_PER_NODE"])
        if "SLURM_PROCID" in env
        else _place(env)
    ),
    "host_from_one": lambda env: (*_place(env)[:2], _place(env)[2] + 1),
    "local_is_rank": lambda env: (_place(env)[0], _place(env)[0], _place(env)[2]),
    "texts": lambda env: tuple(map(str, _place(env))),
    "order": lambda env: (_place(env)[0], *_place(env)[:0:-1]),
}
