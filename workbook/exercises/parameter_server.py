"""Checks of the parameter server's parts: a worker, three kinds of server, ranks that are both.

Where the learner writes only one of the parts, the other ranks run this module's code.

Symbols: P ranks, K servers (the first ranks), v the parameters [N], g_r the sum of the gradients
of rank r's samples [N], B the samples of all workers.
"""

import itertools
import time
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from labkit import collectives
from labkit.collectives.ring import split_chunks
from labkit.comm.comm import Comm
from labkit.costs.traffic import Cost, parameter_server_cost, ring_all_reduce_cost
from labkit.schedules.ring import chunk_bounds
from labkit.strategies.parameter_server import answer_one_by_one
from workbook.exercises.grader import WORLD_SIZES, Case, Exercise, Mistake, Target, Verdict, grade
from workbook.exercises.grader.compare import same, short
from workbook.exercises.grader.exercise import DRAWN

LR = 0.1
# Different from every number of ranks, so that a wrong divisor never gives the right result.
BATCH_SIZE = 7
# With this many elements a server of three workers is called twice, in which they come in opposite
# orders: of two pushes, the order does not change the sum.
_TWICE = (10, 4)
_APART_S = 0.005


def push_and_pull(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, gradient, values)``, one step of a worker; rank 0 is the only server.

    It must send ``gradient`` to rank 0, and receive rank 0's answer into ``values``.
    """
    return grade(fn, _of_a_worker("push_and_pull", "gradient, values", _one), world_sizes)


def one_by_one(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, values)``, the naive server: one step of rank 0.

    It must receive a gradient [N] from a worker, make the update ``values -= 0.1 * gradient`` in
    place, send ``values`` to this worker, and go on with the next. Any order of workers is right.
    """
    exercise = Exercise(
        "parameter_server.one_by_one",
        inputs=lambda rank, case: (_start(case), case.tensor(rank)),
        signature="comm, values",
        call=_with_workers,
        judge=_in_some_order,
        target=partial(_sends, parameter_server_cost),
        library=answer_one_by_one,
        drawn_size=DRAWN,
    )
    return grade(fn, exercise, world_sizes)


def server(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, values, batch_size)``, one step of rank 0, which serves all other ranks.

    It must receive a gradient [N] from each worker, make the update ``values -= 0.1 * sum /
    batch_size`` in place, once, and send ``values`` to each worker. In whatever order the workers
    come, the result must have the same bits.
    """
    exercise = Exercise(
        "parameter_server.server",
        lambda rank, case: _updated(case, range(1, case.world_size)),
        inputs=lambda rank, case: (_start(case), case.tensor(rank)),
        signature="comm, values, batch_size",
        call=_in_both_orders,
        target=_sends_twice,
        mistakes=_SERVER,
        drawn_size=DRAWN,
    )
    return grade(fn, exercise, world_sizes)


def worker(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, gradient, values, servers)``, one step of the ranks from ``servers`` on.

    It must send slice k of ``gradient`` to server k, which is rank k, and receive the answer of
    server k into slice k of ``values``. The slices are ``chunk_bounds(N, servers)``.
    """
    exercise = _of_a_worker("worker", "gradient, values, servers", _servers)
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
        drawn_size=DRAWN,
        may_call=frozenset(dir(collectives)),
    )
    return grade(fn, exercise, world_sizes)


def _of_a_worker(name: str, takes: str, servers: Callable[[int], int]) -> Exercise:
    """Ranks from ``servers(P)`` on run the learner's function, the others this module's server."""

    def workers(case: Case) -> range:
        return range(servers(case.world_size), case.world_size)

    return Exercise(
        f"parameter_server.{name}",
        lambda rank, case: _updated(case, workers(case)) if rank in workers(case) else None,
        inputs=lambda rank, case: (_start(case), case.tensor(rank)),
        signature=f"comm, {takes}",
        call=partial(_with_servers, servers, "servers" in takes),
        target=lambda rank, case: _sends(
            parameter_server_cost, rank, case, servers(case.world_size)
        ),
        mistakes={key: partial(wrong, workers) for key, wrong in _WORKER.items()},
        drawn_size=DRAWN,
    )


def _with_servers(
    servers_of: Callable[[int], int],
    takes_servers: bool,
    fn: Callable,
    comm: Comm,
    values: Tensor,
    gradient: Tensor,
) -> None:
    servers = servers_of(comm.world_size)
    if comm.rank >= servers:
        fn(comm, gradient, values, *([servers] if takes_servers else []))
        return
    start, end = chunk_bounds(len(values), servers)[comm.rank]
    mine, total = values[start:end], torch.zeros(end - start)
    for worker in range(servers, comm.world_size):
        comm.recv_add(total, worker)
    mine -= LR * total / BATCH_SIZE
    for worker in range(servers, comm.world_size):
        comm.send(mine, worker)


def _one(world_size: int) -> int:
    return 1


def _servers(world_size: int) -> int:
    return world_size - world_size // 2


def _with_workers(
    fn: Callable, comm: Comm, values: Tensor, gradient: Tensor, *options: int
) -> None:
    if comm.rank == 0:
        fn(comm, values, *options)
    else:
        comm.send(gradient, 0)
        comm.recv(values, 0)


def _in_both_orders(fn: Callable, comm: Comm, values: Tensor, gradient: Tensor) -> Mistake | None:
    """Call ``fn``, and where it is called twice: worker 1 comes first, then the last one does."""
    twice, before = (len(values), comm.world_size) == _TWICE, values.clone()
    time.sleep(_APART_S * comm.rank if twice else 0.0)
    _with_workers(fn, comm, values, gradient, BATCH_SIZE)
    if not twice:
        return None
    first = values.clone()
    values.copy_(before)
    time.sleep(_APART_S * (comm.world_size - comm.rank))
    _with_workers(fn, comm, values, gradient, BATCH_SIZE)
    in_other_bits = same(first, values) and not torch.equal(first, values)
    return Mistake("server.order") if in_other_bits else None


def _sends(cost_of: Callable[..., Cost], rank: int, case: Case, *servers: int) -> Target:
    cost = cost_of(case.size, 4, case.world_size, rank, *servers)
    return Target(cost.messages, cost.num_bytes)


def _sends_twice(rank: int, case: Case) -> Target:
    cost = parameter_server_cost(case.size, 4, case.world_size, rank)
    calls = 2 if (case.size, case.world_size) == _TWICE else 1
    return Target(calls * cost.messages, calls * cost.num_bytes)


def _sends_a_ring(rank: int, case: Case) -> Target:
    """As many bytes as chunks of equal, padded size need: any numbering of the chunks will do."""
    padded = -(-case.size // case.world_size) * case.world_size
    cost = ring_all_reduce_cost(padded, 4, case.world_size, rank)
    return Target(cost.messages, cost.num_bytes)


def _start(case: Case) -> Tensor:
    """v: the same on all ranks."""
    return case.tensor(case.world_size)


def _sum(case: Case, ranks: Iterable[int]) -> Tensor:
    return sum((case.tensor(rank) for rank in ranks), torch.zeros(case.size))


def _updated(case: Case, workers: Iterable[int], factor: float = 1 / BATCH_SIZE) -> Tensor:
    return _start(case) - LR * factor * _sum(case, workers)


def _all_but_0(case: Case) -> range:
    return range(1, case.world_size)


def _server_right(rank: int, case: Case, workers_value: Tensor) -> Tensor:
    """The values on ``rank`` if only those of the workers are wrong."""
    return workers_value if rank else _updated(case, _all_but_0(case))


def _sum_of_sums(case: Case) -> Tensor:
    """The sum of the first push, plus the sum of the first two, and so on, up to all."""
    return case.over_ranks(lambda last: _sum(case, range(1, last + 1)))


def _served(case: Case, of: Callable[[int], Tensor]) -> Tensor:
    """The tensor in which slice s is that of ``of(s)``."""
    ranks = range(case.world_size)
    return torch.cat([split_chunks(of(s), case.world_size)[s] for s in ranks])


def _all_but(case: Case, rank: int) -> Iterable[int]:
    return (r for r in range(case.world_size) if r != rank)


def _own_slice(rank: int, case: Case, own: Tensor, others: Tensor) -> Tensor:
    return _served(case, lambda s: own if s == rank else others)


def _in_some_order(case: Case, values: list[Tensor]) -> Mistake | None:
    """Whether the workers were answered one by one, in any order; else what happened instead."""
    workers, ranks = _all_but_0(case), range(case.world_size)
    due = [_updated(case, range(1, r + 1) if r else workers, 1) for r in ranks]
    for order in itertools.permutations(workers):
        place = {r: order.index(r) + 1 for r in workers} | {0: len(order)}
        if all(same(values[r], _updated(case, order[: place[r]], 1)) for r in ranks):
            return None
    for id, wrong in _ONE_BY_ONE.items():
        if all(same(values[r], wrong(r, case)) for r in ranks):
            return Mistake(id)
    rank = next(r for r in ranks if not same(values[r], due[r]))
    shown = {"value": short(values[rank][:3]), "due": short(due[rank][:3])}
    return Mistake("one_by_one.differs", rank=rank, **shown)


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

# The same for a server that answers one by one.
_ONE_BY_ONE = {
    "one_by_one.collected": lambda r, c: _updated(c, _all_but_0(c), 1),
    "one_by_one.sent_old": lambda r, c: _updated(c, range(1, r or c.world_size), 1),
    "one_by_one.own_push": lambda r, c: _updated(c, [r], 1) if r else _start(c),
    "server.wrong_sign": lambda r, c: _updated(c, range(1, (r or c.world_size - 1) + 1), -1),
    "server.not_in_place": lambda r, c: _updated(c, range(1, r + 1), 1),
}

# The same for a worker; w(c) are the ranks that work.
_WORKER = {
    "worker.unchanged": lambda w, r, c: _start(c),
    "worker.added": lambda w, r, c: _start(c) + _updated(c, w(c)),
    "worker.pushed_parameters": lambda w, r, c: (1 - LR * len(w(c)) / BATCH_SIZE) * _start(c),
    "worker.scaled": lambda w, r, c: _updated(c, w(c), LR / BATCH_SIZE),
    "worker.updated_again": lambda w, r, c: _updated(c, w(c)) - LR * c.tensor(r),
}

_SHARDS = {
    "server.not_divided": lambda r, c: _updated(c, range(c.world_size), 1),
    "shards.over_ranks": lambda r, c: _updated(c, range(c.world_size), 1 / c.world_size),
    "shards.own_gradient": lambda r, c: _updated(c, [r]),
    "shards.own_slice": lambda r, c: _own_slice(r, c, _updated(c, range(c.world_size)), _start(c)),
    "shards.own_old": lambda r, c: _own_slice(r, c, _start(c), _updated(c, range(c.world_size))),
    "shards.own_missing": lambda r, c: _served(c, lambda s: _updated(c, _all_but(c, s))),
    "server.last_push_only": (
        lambda r, c: _served(c, lambda s: _updated(c, [(s + 1) % c.world_size]))
    ),
    "shards.unchanged": lambda r, c: _start(c),
    "server.wrong_sign": lambda r, c: _updated(c, range(c.world_size), -1 / BATCH_SIZE),
    "shards.sum": lambda r, c: _sum(c, range(c.world_size)),
}
