"""Page 04: the parameter server's parts: a worker, three kinds of server, ranks that are both.

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
from labkit.comm.comm import Comm
from labkit.costs.traffic import parameter_server_cost
from labkit.schedules.ring import chunk_bounds
from labkit.strategies.parameter_server import answer_one_by_one
from workbook.exercises.grader import WORLD_SIZES, Case, Exercise, Target, Verdict, Wrong, grade
from workbook.exercises.grader.compare import same, short
from workbook.exercises.grader.exercise import DRAWN, Found, same_bits
from workbook.exercises.ring import ring_target

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
    return grade(fn, _of_a_worker("push_and_pull", "gradient, values", lambda P: 1), world_sizes)


def worker(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, gradient, values, servers)``, one step of the ranks from ``servers`` on.

    It must send slice k of ``gradient`` to server k, which is rank k, and receive the answer of
    server k into slice k of ``values``. The slices are ``chunk_bounds(N, servers)``.
    """
    exercise = _of_a_worker("worker", "gradient, values, servers", lambda P: P - P // 2)
    return grade(fn, exercise, world_sizes)


def one_by_one(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, values)``, the naive server: one step of rank 0.

    It must receive a gradient [N] from a worker, make the update ``values -= 0.1 * gradient`` in
    place, send ``values`` to this worker, and go on with the next. Any order of workers is right.
    """

    def in_some_order(case: Case, values: list[Tensor]) -> Found:
        """Whether each worker has the updates up to its own, in any order of the workers."""
        workers = range(1, case.world_size)
        for order in itertools.permutations(workers):
            after = {r: order[: n + 1] for n, r in enumerate(order)} | {0: order}
            if all(same(values[r], _updated(case, after[r], 1)) for r in after):
                return None
        by_rank = [_updated(case, range(1, (r or workers[-1]) + 1), 1) for r in (0, *workers)]
        found, expected = ([short(one[:3]) for one in each] for each in (values, by_rank))
        text = f"the ranks hold {', '.join(found)}, which fits no order of the workers in which "
        text += "each push is answered before the next is received; in the order of the ranks "
        return f"{text}that would be {', '.join(expected)} (first elements)"

    exercise = Exercise(
        "parameter_server.one_by_one",
        inputs=lambda rank, case: (_start(case), case.tensor(rank)),
        signature="comm, values",
        call=_with_workers,
        judge=in_some_order,
        target=_sends,
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

    def target(rank: int, case: Case) -> Target:
        once = _sends(rank, case)
        calls = 2 if (case.size, case.world_size) == _TWICE else 1
        return Target(calls * (once.messages or 0), calls * (once.num_bytes or 0))

    def workers_of(case: Case) -> range:
        return range(1, case.world_size)

    exercise = Exercise(
        "parameter_server.server",
        lambda rank, case: _updated(case, workers_of(case)),
        inputs=lambda rank, case: (_start(case), case.tensor(rank)),
        signature="comm, values, batch_size",
        call=_in_both_orders,
        target=target,
        parts=partial(_parts, 1),
        mistakes={
            "the workers have the new parameters, the server still has the old ones": (
                lambda r, case: _updated(case, workers_of(case)) if r else _start(case)
            ),
            "the workers get the parameters as they were before the update": (
                lambda r, case: _start(case) if r else _updated(case, workers_of(case))
            ),
            "every worker gets only the pushes received so far: wait for the last one": (
                lambda r, case: _updated(case, range(1, (r or case.world_size - 1) + 1))
            ),
        },
        drawn_size=DRAWN,
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
        target=lambda rank, case: ring_target(case.size, 4, rank, case),
        rule=same_bits,
        parts=partial(_parts, 0),
        drawn_size=DRAWN,
        may_call=frozenset(dir(collectives)),
    )
    return grade(fn, exercise, world_sizes)


def _of_a_worker(name: str, takes: str, servers_of: Callable[[int], int]) -> Exercise:
    """Ranks from ``servers_of(P)`` on run the learner's function, the others this module's."""

    def workers(case: Case) -> range:
        return range(servers_of(case.world_size), case.world_size)

    def call(fn: Callable, comm: Comm, values: Tensor, gradient: Tensor) -> None:
        servers = servers_of(comm.world_size)
        if comm.rank >= servers:
            fn(comm, gradient, values, *([servers] if "servers" in takes else []))
            return
        start, end = chunk_bounds(len(values), servers)[comm.rank]
        mine, total = values[start:end], torch.zeros(end - start)
        for worker in range(servers, comm.world_size):
            comm.recv_add(total, worker)
        mine -= LR * total / BATCH_SIZE
        for worker in range(servers, comm.world_size):
            comm.send(mine, worker)

    return Exercise(
        f"parameter_server.{name}",
        lambda rank, case: _updated(case, workers(case)) if rank in workers(case) else None,
        inputs=lambda rank, case: (_start(case), case.tensor(rank)),
        signature=f"comm, {takes}",
        call=call,
        target=lambda rank, case: _sends(rank, case, servers_of(case.world_size)),
        parts=lambda case: _parts(servers_of(case.world_size), case),
        mistakes={
            "values is unchanged: receive into values, or into slices of it": (
                lambda rank, case: _start(case)
            ),
            "the pulled parameters were added to the old ones, instead of replacing them": (
                lambda rank, case: _start(case) + _updated(case, workers(case))
            ),
        },
        drawn_size=DRAWN,
    )


def _with_workers(
    fn: Callable, comm: Comm, values: Tensor, gradient: Tensor, *options: int
) -> None:
    if comm.rank == 0:
        fn(comm, values, *options)
    else:
        comm.send(gradient, 0)
        comm.recv(values, 0)


def _in_both_orders(fn: Callable, comm: Comm, values: Tensor, gradient: Tensor) -> Wrong | None:
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
    if same(first, values) and not torch.equal(first, values):
        text = "the last bits depend on which worker comes first: add the pushes in a fixed order"
        return Wrong(text)
    return None


def _sends(rank: int, case: Case, *servers: int) -> Target:
    cost = parameter_server_cost(case.size, 4, case.world_size, rank, *servers)
    return Target(cost.messages, cost.num_bytes)


def _start(case: Case) -> Tensor:
    """v: the same on all ranks."""
    return case.tensor(case.world_size)


def _updated(case: Case, workers: Iterable[int], factor: float = 1 / BATCH_SIZE) -> Tensor:
    total = sum((case.tensor(rank) for rank in workers), torch.zeros(case.size))
    return _start(case) - LR * factor * total


def _parts(first: int, case: Case) -> dict[str, Tensor]:
    """What a wrong value may be made of: v, and by worker its part of the right update."""
    steps = {f"the update of g_{r}": r for r in range(first, case.world_size)}
    scaled = {name: -LR / BATCH_SIZE * case.tensor(r) for name, r in steps.items()}
    return {"v": _start(case), **scaled}
