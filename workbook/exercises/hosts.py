"""Page 12: all-reduce over several hosts, in pieces, and the place of a process.

The ranks of one machine play the ranks of several hosts: what counts is which of them send to
each other. Hosts have different numbers of ranks, and ranks are numbered host by host.

Symbols: P ranks on H hosts, S bytes of a rank's tensor.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.collectives import hierarchical_all_reduce
from labkit.collectives.ring import split_chunks
from labkit.comm.comm import Comm
from labkit.comm.emulated_link import EmulatedLink
from labkit.costs import card_bytes
from labkit.schedules.ring import chunk_bounds
from labkit.units import format_bytes
from workbook.exercises.grader import Case, Exercise, Target, Verdict, answers, grade
from workbook.exercises.grader.exercise import DRAWN, Found, Ranks, same_bits
from workbook.exercises.grader.own_run import own_run
from workbook.exercises.ring import ring_target

Hosts = tuple[tuple[int, ...], ...]

# P -> the number of ranks on each host.
_RANKS = {4: (2, 2), 5: (3, 2), 6: (1, 3, 2)}
_WORLD_SIZES = tuple(_RANKS)
# The card of each host in a run that is drawn: 1 MB takes 25 ms.
_LINK = EmulatedLink(0.001, 40e6, ranks_per_host=2)
# Divisible by 1, 2 and 3 parts of 2 and 3 pieces, and large beside the rounding of the others.
_SIZES = (240, 50, 7, 1, 0)


def _in_words(case: Case) -> str:
    return f"hosts of {' + '.join(map(str, _RANKS[case.world_size]))} ranks"


_exercise = partial(Exercise, sizes=_SIZES, drawn_size=DRAWN, special=_in_words)


def inside(fn: Callable, *, world_sizes: tuple[int, ...] = _WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, chunks, host)``: the host's sum of chunk i on rank ``host[i]``, in place.

    There are as many chunks as the smallest host has ranks. Target per rank: one message for each
    chunk that it does not keep, to a rank of its own host.
    """

    def target(rank: int, case: Case) -> Target:
        host = _host(rank, case)
        sizes = [end - start for start, end in chunk_bounds(case.size, _parts(case))]
        sent = [size for owner, size in zip(host, sizes) if owner != rank]
        return Target(len(sent), 4 * sum(sent), peers=frozenset(host) - {rank})

    def sums(of: Callable[[int, Case], Iterable[int]], rank: int, case: Case) -> list:
        """The sum over some ranks of the chunk that ``rank`` keeps; None for the others."""
        host, columns = _host(rank, case), zip(*(_chunks(r, case) for r in of(rank, case)))
        return [_sum(one) if host[i] == rank else None for i, one in enumerate(columns)]

    exercise = _exercise(
        "hosts.inside",
        partial(sums, _host),
        signature="comm, chunks, host",
        inputs=lambda rank, case: (_chunks(rank, case), _host(rank, case)),
        chunked=True,
        mistakes={
            "it is the sum over the ranks of all hosts: only those in host belong": partial(
                sums, lambda rank, case: range(case.world_size)
            ),
        },
        target=target,
    )
    return grade(fn, exercise, world_sizes)


def between(fn: Callable, *, world_sizes: tuple[int, ...] = _WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, chunk, peers)``: the sum over ``peers``, one rank per host, in place.

    It is called on these ranks only. Target per rank: the ring of H ranks, 2 (H - 1) messages of
    one piece of the chunk each, to others of ``peers``.
    """

    def peers_of(rank: int, case: Case) -> tuple[int, ...]:
        """The ranks at this rank's place on each host; place 0 if not every host has it."""
        place = _host(rank, case).index(rank)
        return tuple(host[place if place < _parts(case) else 0] for host in hosts_of(case))

    def call(fn: Callable, comm: Comm, chunk: Tensor, peers: tuple[int, ...]) -> Any:
        return fn(comm, chunk, peers) if comm.rank in peers else None

    def expected(rank: int, case: Case) -> Tensor | None:
        peers = peers_of(rank, case)
        return _sum(map(case.tensor, peers)) if rank in peers else None

    def target(rank: int, case: Case) -> Target:
        peers = peers_of(rank, case)
        if rank not in peers:
            return Target(0, 0, peers=frozenset())
        ring = ring_target(case.size, 4, peers.index(rank), Case(len(peers), case.size))
        return ring._replace(peers=frozenset(peers) - {rank})

    exercise = _exercise(
        "hosts.between",
        expected,
        signature="comm, chunk, peers",
        inputs=lambda rank, case: (case.tensor(rank), peers_of(rank, case)),
        call=call,
        target=target,
    )
    return _over_a_card(fn, exercise, world_sizes)


def all_reduce(fn: Callable, *, world_sizes: tuple[int, ...] = _WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor, hosts)``: the sum over all ranks in place, over several hosts.

    ``hosts`` are the ranks of each host. Target: 2 (H - 1) / H x S bytes leave each host. Inside
    of the hosts any traffic is right. The results must be equal to the bit.
    """

    def leaves_too_much(case: Case, ranks: Ranks) -> Found:
        hosts = hosts_of(case)
        # Ranks may cut a tensor into up to P pieces before the ring of hosts cuts them into H.
        slack = 4 * 2 * (len(hosts) - 1) * case.world_size
        for number, host in enumerate(hosts):
            sent = Counter[int]()
            for rank in host:
                sent.update(ranks[rank].bytes_to)
            leaving = sum(count for peer, count in sent.items() if peer not in host)
            target = card_bytes("hierarchical", case.size, 4, hosts)[number]
            if leaving > target + slack:
                text = f"{format_bytes(leaving)} leave host {number} by its card, where the target"
                ring = format_bytes(card_bytes("ring", case.size, 4, hosts)[number])
                text += f" is {format_bytes(target)}; one ring through all ranks has {ring}"
                return f"{text}: add up inside each host first"
        return same_bits(case, ranks)

    def not_inside(rank: int, case: Case) -> Tensor:
        by_place = zip(*(host[: _parts(case)] for host in hosts_of(case)))
        return torch.cat(
            [_sum(_chunks(peer, case)[i] for peer in peers) for i, peers in enumerate(by_place)]
        )

    def labkits(comm: Comm, tensor: Tensor, hosts: Hosts) -> None:
        before, comm.hosts = comm.hosts, hosts
        try:
            hierarchical_all_reduce(comm, tensor)
        finally:
            comm.hosts = before

    exercise = _exercise(
        "hosts.all_reduce",
        lambda rank, case: case.total(),
        signature="comm, tensor, hosts",
        inputs=lambda rank, case: (case.tensor(rank), hosts_of(case)),
        rule=leaves_too_much,
        mistakes={
            "each chunk is summed over one rank of each host: the others of it are missing": (
                not_inside
            ),
        },
        library=labkits,
    )
    return _over_a_card(fn, exercise, world_sizes)


def _over_a_card(fn: Callable, exercise: Exercise, world_sizes: tuple[int, ...]) -> Verdict:
    """Grade; the learner's own run is drawn over the hosts' cards."""
    verdict = grade(fn, exercise, world_sizes)
    verdict.run_again = partial(own_run, fn, exercise, link=_LINK)
    return verdict


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


def _sum(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.double() for tensor in tensors]).sum(0).float()


# The place of a process

# Of torchrun with 4 and 2 processes on its nodes, alone and started by Slurm (rank, local rank,
# host; SLURM_PROCID, SLURM_TASKS_PER_NODE); of Slurm alone: the ranks, the tasks.
_TORCHRUN = [(5, 1, 1, {}), (3, 3, 0, {}), (4, 0, 1, {"SLURM_PROCID": "1"})]
_SLURM = [
    ((0, 3), "2,2"),
    ((1, 4, 6), "2(x3),1"),
    ((2, 3, 4, 5, 8), "3,1(x2),4"),
    ((13,), "12(x2)"),
]


def _environments() -> Iterator[dict[str, str]]:
    for rank, local_rank, host, more in _TORCHRUN:
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "GROUP_RANK": str(host)}
        slurm = more | {"SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_NNODES": "2"} if more else {}
        yield {"MASTER_ADDR": "node01", "MASTER_PORT": "29400"} | own | slurm
    for ranks, tasks in _SLURM:
        for rank in ranks:
            nodes = {"SLURM_TASKS_PER_NODE": tasks, "SLURM_NNODES": str(len(_tasks(tasks)))}
            yield {"SLURM_PROCID": str(rank)} | nodes


def _tasks(text: str) -> list[int]:
    """The tasks of each node: ``2(x3),1`` is [2, 2, 2, 1]."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]


def place(fn: Callable) -> Verdict:
    """Grade ``fn(environment)``: (rank, local rank, host) of a process of torchrun or of Slurm.

    ``environment`` is a dict of texts. Under Slurm the local rank and the host follow from
    SLURM_PROCID and SLURM_TASKS_PER_NODE. Under a torchrun that Slurm has started, torchrun's
    variables are right. Runs in another process.
    """

    def place_in(
        environment: Mapping[str, str], torchruns: bool = True, even: bool = False
    ) -> tuple[int, ...]:
        if "RANK" in environment and torchruns:
            return tuple(int(environment[n]) for n in ("RANK", "LOCAL_RANK", "GROUP_RANK"))
        rank, tasks = int(environment["SLURM_PROCID"]), _tasks(environment["SLURM_TASKS_PER_NODE"])
        tasks = [tasks[0]] * (rank + 1) if even else tasks
        places = [(local, host) for host, count in enumerate(tasks) for local in range(count)]
        return rank, *places[rank]

    return answers(
        fn,
        [((environment,), place_in(environment)) for environment in _environments()],
        name="hosts.place",
        signature="environment",
        mistakes={
            "it holds only where every node has as many tasks as the first": partial(
                place_in, even=True
            ),
            "inside of a Slurm job, torchrun's RANK, LOCAL_RANK and GROUP_RANK are right": (
                lambda env: place_in(env, torchruns="SLURM_PROCID" not in env)
            ),
        },
    )
