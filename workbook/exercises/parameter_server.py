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

from labkit.costs.traffic import parameter_server_cost
from labkit.engine.comm.comm import Comm
from labkit.schedules.ring import chunk_bounds
from labkit.units import format_count
from workbook.exercises.grader import Case, Check, Target, Wrong
from workbook.exercises.grader.compare import agree, beside
from workbook.exercises.grader.exercise import Found, same_bits
from workbook.exercises.grader.judge_values import in_words, made_of
from workbook.exercises.ring import ring_target

LR = 0.1
# Different from every number of ranks, so that a wrong divisor never gives the right result.
BATCH_SIZE = 7
_APART_S = 0.015


def _sends(rank: int, case: Case, servers: int = 1, calls: int = 1) -> Target:
    cost = parameter_server_cost(case.size, 4, case.world_size, rank, servers)
    return Target(calls * cost.messages, calls * cost.num_bytes)


def _start(case: Case) -> Tensor:
    """v: the same on all ranks."""
    return case.tensor(case.world_size)


def _updated(case: Case, workers: Iterable[int], factor: float = 1 / BATCH_SIZE) -> Tensor:
    return _start(case) - LR * factor * case.total(workers)


def _parts(first: int, case: Case) -> dict[str, Tensor]:
    """The parts of a wrong value: v, and by worker its part of the right update."""
    parts = {"v": _start(case)}
    for rank in range(first, case.world_size):
        parts[f"the update of g_{rank}"] = -LR / BATCH_SIZE * case.tensor(rank)
    return parts


def _servers(case: Case) -> int:
    """The number of servers: each that leaves a worker, by turns."""
    return 1 + (case.size + case.call + case.seed) % (case.world_size - 1)


def _beside_servers(
    fn: Callable, comm: Comm, values: Tensor, gradient: Tensor, servers: int
) -> None:
    """The learner's function on the workers, a server's part on the other ranks."""
    if comm.rank >= servers:
        fn(comm, gradient, values, servers)
        return
    start, end = chunk_bounds(len(values), servers)[comm.rank]
    shard = values[start:end]
    total = torch.zeros(end - start)
    for worker in range(servers, comm.world_size):
        comm.recv_add(total, worker)
    shard -= LR * total / BATCH_SIZE
    for worker in range(servers, comm.world_size):
        comm.send(shard, worker)


# Slice k of ``chunk_bounds(N, servers)`` goes to server k, which is rank k, and comes from there.
worker = Check(
    "parameter_server.worker",
    lambda rank, case: (
        _updated(case, range(_servers(case), case.world_size)) if rank >= _servers(case) else None
    ),
    inputs=lambda rank, case: (_start(case), case.tensor(rank), _servers(case)),
    signature="comm, gradient, values, servers",
    call=_beside_servers,
    target=lambda rank, case: _sends(rank, case, _servers(case)),
    stuck={r"has returned, but rank \d+ still": "each server needs its slice, also an empty one"},
    parts=lambda case: _parts(_servers(case), case),
    special=lambda case: format_count(_servers(case), "server"),
)


def _with_workers(fn: Callable, comm: Comm, values: Tensor, gradient: Tensor, *more: int) -> None:
    if comm.rank == 0:
        fn(comm, values, *more)
    else:
        comm.send(gradient, 0)
        comm.recv(values, 0)


def _in_some_order(case: Case, values: list[Tensor]) -> Found:
    """Judge that each worker has the updates up to its own, in any order of the workers."""
    workers = range(1, case.world_size)
    summands = [_start(case), *map(case.tensor, workers)]
    by_order = []
    for order in itertools.permutations(workers):
        expected = [_updated(case, order, 1)]
        for worker in workers:
            expected.append(_updated(case, order[: order.index(worker) + 1], 1))
        if agree(values, expected, summands):
            return None
        by_order.append(expected)
    if agree(values[0], _start(case)):
        return "the values of rank 0 have not changed: write into them (-=, sub_, copy_)"
    parts = {"v": _start(case)}
    for worker in workers:
        parts[f"the update of g_{worker}"] = -LR * case.tensor(worker)
    for rank, (value, expected) in enumerate(zip(values, by_order[0])):
        if not agree(value, expected, summands):
            factors = made_of(value, parts)
            if not factors:
                return f"rank {rank} holds {beside(value, expected)}"
            pair = f"{in_words(factors)}, expected {in_words(made_of(expected, parts))}"
            return f"rank {rank} holds {pair}, or so by another order of the workers"
    return None


@torch.no_grad()
def answer_one_by_one(comm: Comm, values: Tensor, lr: float = LR) -> None:
    """Update the parameters [N] of rank 0 with each push, and answer it at once: not one model."""
    push = torch.empty_like(values)
    for worker in range(1, comm.world_size):
        comm.recv(push, worker)
        values -= lr * push
        comm.send(values, worker)


# For each worker, in any order: receive [N], ``values -= 0.1 * gradient``, send ``values``.
one_by_one = Check(
    "parameter_server.one_by_one",
    inputs=lambda rank, case: (_start(case), case.tensor(rank)),
    signature="comm, values",
    call=_with_workers,
    judge=_in_some_order,
    target=_sends,
    library=answer_one_by_one,
)


def _num_calls(num_elements: int, world_size: int) -> int:
    # Twice, in opposite orders, with three workers: a sum of two does not depend on the order.
    return 2 if (num_elements, world_size) == (10, 4) else 1


def _in_both_orders(fn: Callable, comm: Comm, values: Tensor, gradient: Tensor) -> Wrong | None:
    """Call ``fn``, and where it is called twice: worker 1 comes first, then the last one does."""
    if _num_calls(len(values), comm.world_size) == 1:
        _with_workers(fn, comm, values, gradient, BATCH_SIZE)
        return None
    before = values.clone()
    results = []
    for turn in (comm.rank, -comm.rank):
        # From zeros, the last bits are those of the sum.
        values.zero_()
        time.sleep(_APART_S * (turn % comm.world_size))
        _with_workers(fn, comm, values, gradient, BATCH_SIZE)
        results.append(values.clone())
    first, second = results
    if agree(first, second) and not torch.equal(first, second):
        return Wrong(
            "the last bits depend on which worker comes first: add the pushes in a fixed order"
        )
    values += before
    return None


# ``values -= 0.1 * sum / batch_size``, with the same bits in whatever order the pushes come.
server = Check(
    "parameter_server.server",
    lambda rank, case: _updated(case, range(1, case.world_size)),
    inputs=lambda rank, case: (_start(case), case.tensor(rank)),
    signature="comm, values, batch_size",
    call=_in_both_orders,
    target=lambda rank, case: _sends(rank, case, calls=_num_calls(case.size, case.world_size)),
    parts=partial(_parts, 1),
)
# Every rank is server and worker; no more bytes than in a ring all-reduce.
shards = Check(
    "parameter_server.shards",
    lambda rank, case: _updated(case, range(case.world_size)),
    inputs=lambda rank, case: (case.tensor(rank), _start(case), BATCH_SIZE),
    signature="comm, gradient, values, batch_size",
    written=1,
    chunked=True,
    target=lambda rank, case: ring_target(case.size, 4, rank, case),
    rule=same_bits,
    parts=partial(_parts, 0),
)
