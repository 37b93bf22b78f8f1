"""Checks of the parameter server's parts: the server, a worker, and ranks that are both.

Where the learner writes only one of the parts, the other ranks run this module's code.

Symbols: P ranks, K servers (the first ranks), v the parameters [N], g_r the sum of the gradients
of rank r's samples [N], B the samples of all workers.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from labkit import collectives
from labkit.check.grading import WORLD_SIZES, Case, Exercise, Target, Verdict, grade
from labkit.collectives.ring import split_chunks
from labkit.comm.comm import Comm
from labkit.costs.traffic import Cost, parameter_server_cost, ring_all_reduce_cost
from labkit.schedules.ring import chunk_bounds, owned_chunk

LR = 0.1
# Different from every number of ranks, so that a wrong divisor never gives the right result.
BATCH_SIZE = 7


def server(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, values, batch_size)``, one step of rank 0, which serves all other ranks.

    It must receive a gradient [N] from each worker, make the update ``values -= 0.1 * sum /
    batch_size`` in place, once, and send ``values`` to each worker.
    """
    exercise = Exercise(
        "parameter_server.server",
        lambda rank, case: _updated(case, range(1, case.world_size)),
        inputs=lambda rank, case: (_start(case), case.tensor(rank)),
        signature="comm, values, batch_size",
        call=_with_workers,
        target=partial(_sends, parameter_server_cost),
        mistakes=_SERVER,
    )
    return grade(fn, exercise, world_sizes)


def worker(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, gradient, values, servers)``, one step of the ranks from ``servers`` on.

    It must send slice k of ``gradient`` to server k, which is rank k, and receive the answer of
    server k into slice k of ``values``. The slices are ``chunk_bounds(N, servers)``.
    """
    exercise = Exercise(
        "parameter_server.worker",
        lambda rank, case: _updated(case, _workers(case)) if rank in _workers(case) else None,
        inputs=lambda rank, case: (_start(case), case.tensor(rank)),
        signature="comm, gradient, values, servers",
        call=_with_servers,
        target=lambda rank, case: _sends(
            parameter_server_cost, rank, case, _servers(case.world_size)
        ),
        mistakes=_WORKER,
    )
    return grade(fn, exercise, world_sizes)


def shards(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, gradient, values, batch_size)``: every rank is server and worker.

    All ranks must end with ``values - 0.1 * (sum of all gradients) / batch_size``, in place and
    equal to the bit, and no rank may send more than in a ring all-reduce.
    """
    exercise = Exercise(
        "parameter_server.shards",
        lambda rank, case: _updated(case, range(case.world_size)),
        inputs=lambda rank, case: (case.tensor(rank), _start(case), BATCH_SIZE),
        signature="comm, gradient, values, batch_size",
        written=1,
        chunked=True,
        target=_sends_a_ring,
        any_chunks=True,
        same_bits=True,
        mistakes=_SHARDS,
        may_call=frozenset(vars(collectives)),
    )
    return grade(fn, exercise, world_sizes)


def _with_workers(fn: Callable, comm: Comm, values: Tensor, gradient: Tensor) -> None:
    if comm.rank == 0:
        fn(comm, values, BATCH_SIZE)
    else:
        comm.send(gradient, 0)
        comm.recv(values, 0)


def _with_servers(fn: Callable, comm: Comm, values: Tensor, gradient: Tensor) -> None:
    servers = _servers(comm.world_size)
    if comm.rank >= servers:
        fn(comm, gradient, values, servers)
        return
    start, end = chunk_bounds(len(values), servers)[comm.rank]
    mine, total = values[start:end], torch.zeros(end - start)
    for worker in range(servers, comm.world_size):
        comm.recv_add(total, worker)
    mine -= LR * total / BATCH_SIZE
    for worker in range(servers, comm.world_size):
        comm.send(mine, worker)


def _servers(world_size: int) -> int:
    return world_size - world_size // 2


def _workers(case: Case) -> range:
    return range(_servers(case.world_size), case.world_size)


def _sends(cost_of: Callable[..., Cost], rank: int, case: Case, *servers: int) -> Target:
    cost = cost_of(case.size, 4, case.world_size, rank, *servers)
    return Target(cost.messages, cost.num_bytes)


def _sends_a_ring(rank: int, case: Case) -> Target:
    """As many bytes as chunks of equal, padded size need: any numbering of the chunks will do."""
    padded = -(-case.size // case.world_size) * case.world_size
    cost = ring_all_reduce_cost(padded, 4, case.world_size, rank)
    return Target(cost.messages, cost.num_bytes)


def _start(case: Case) -> Tensor:
    """v: the same on all ranks."""
    return case.tensor(case.world_size)


def _sum(case: Case, ranks: range) -> Tensor:
    return sum((case.tensor(rank) for rank in ranks), torch.zeros(case.size))


def _updated(case: Case, workers: range, factor: float = 1 / BATCH_SIZE) -> Tensor:
    return _start(case) - LR * factor * _sum(case, workers)


def _all_but_0(case: Case) -> range:
    return range(1, case.world_size)


def _server_right(rank: int, case: Case, workers_value: Tensor) -> Tensor:
    """The values on ``rank`` if only those of the workers are wrong."""
    return workers_value if rank else _updated(case, _all_but_0(case))


def _sum_of_sums(case: Case) -> Tensor:
    """The sum of the first push, plus the sum of the first two, and so on, up to all."""
    return case.over_ranks(lambda last: _sum(case, range(1, last + 1)))


def _own_chunk_alone(rank: int, case: Case) -> Tensor:
    values, new = _start(case), _updated(case, range(case.world_size))
    chunk = owned_chunk(rank, case.world_size)
    split_chunks(values, case.world_size)[chunk].copy_(split_chunks(new, case.world_size)[chunk])
    return values


# A mistake's id -> what it leaves on rank r. c is the case.

_SERVER = {
    "server.last_push_only": lambda r, c: _updated(c, range(c.world_size - 1, c.world_size)),
    "server.not_divided": lambda r, c: _updated(c, _all_but_0(c), 1),
    "server.over_workers": lambda r, c: _updated(c, _all_but_0(c), 1 / (c.world_size - 1)),
    "server.wrong_sign": lambda r, c: _updated(c, _all_but_0(c), -1 / BATCH_SIZE),
    "server.sent_old": lambda r, c: _server_right(r, c, _start(c)),
    "server.asynchronous": lambda r, c: _server_right(r, c, _updated(c, range(1, r + 1))),
    "server.sent_sum": lambda r, c: _server_right(r, c, _sum(c, _all_but_0(c))),
    "server.parameters_in_sum": (
        lambda r, c: _updated(c, _all_but_0(c)) - LR / BATCH_SIZE * _start(c)
    ),
    "server.update_per_push": lambda r, c: _start(c) - LR / BATCH_SIZE * _sum_of_sums(c),
    "server.not_in_place": lambda r, c: _updated(c, _all_but_0(c)) if r else _start(c),
}

_WORKER = {
    "worker.unchanged": lambda r, c: _start(c),
    "worker.added": lambda r, c: _start(c) + _updated(c, _workers(c)),
    "worker.pushed_parameters": lambda r, c: (1 - LR * len(_workers(c)) / BATCH_SIZE) * _start(c),
    "worker.scaled": lambda r, c: _updated(c, _workers(c), LR / BATCH_SIZE),
    "worker.updated_again": lambda r, c: _updated(c, _workers(c)) - LR * c.tensor(r),
}

_SHARDS = {
    "server.not_divided": lambda r, c: _updated(c, range(c.world_size), 1),
    "shards.over_ranks": lambda r, c: _updated(c, range(c.world_size), 1 / c.world_size),
    "shards.own_gradient": lambda r, c: _updated(c, range(r, r + 1)),
    "shards.own_slice": _own_chunk_alone,
    "shards.unchanged": lambda r, c: _start(c),
    "server.wrong_sign": lambda r, c: _updated(c, range(c.world_size), -1 / BATCH_SIZE),
    "shards.sum": lambda r, c: _sum(c, range(c.world_size)),
}
