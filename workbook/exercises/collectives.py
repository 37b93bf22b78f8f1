"""Checks of the collectives with a root, and of a barrier.

Symbols: P ranks, S bytes of a rank's tensor.
"""

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from labkit import collectives
from labkit.comm.comm import Comm
from labkit.costs.traffic import Cost, broadcast_cost, gather_cost, reduce_cost, scatter_cost
from workbook.exercises.grader import WORLD_SIZES, Case, Exercise, Mistake, Verdict, grade, returns
from workbook.exercises.grader.exercise import DRAWN, Target, tensor_and_root

_LATE_S, _MOST_LATE_S = 0.03, 1.0


def broadcast(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor, root)``: the root's values on all ranks, in place.

    Target: P - 1 messages of S bytes by all ranks together; any rank may send.
    """
    exercise = Exercise(
        "collectives.broadcast",
        signature="comm, tensor, root",
        inputs=tensor_and_root,
        expected=lambda rank, case: case.tensor(case.root),
        total=partial(_of_all_ranks, broadcast_cost),
        library=collectives.broadcast,
        drawn_size=DRAWN,
        root_name="root",
    )
    return grade(fn, exercise, world_sizes)


def reduce(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor, root)``: the sum over the ranks on the root, in place.

    The other ranks' tensors may hold anything. Target: P - 1 messages of S bytes by all ranks
    together.
    """
    exercise = Exercise(
        "collectives.reduce",
        signature="comm, tensor, root",
        inputs=tensor_and_root,
        expected=lambda rank, case: case.total() if rank == case.root else None,
        total=partial(_of_all_ranks, reduce_cost),
        library=collectives.reduce,
        drawn_size=DRAWN,
        root_name="root",
    )
    return grade(fn, exercise, world_sizes)


def gather(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensor, root)``: returns all ranks' tensors on the root, else None.

    The list is in the order of the ranks. Target: every rank but the root sends its tensor to the
    root, once; the root sends nothing.
    """
    exercise = Exercise(
        "collectives.gather",
        signature="comm, tensor, root",
        inputs=tensor_and_root,
        expected=lambda rank, case: _gathered(rank, case, range(case.world_size)),
        written=None,
        target=lambda r, c: c.target(gather_cost, r, c.root, peers={c.root} - {r}),
        mistakes={"gather.one_buffer": _one_buffer, "gather.order": _root_first},
        library=collectives.gather,
        drawn_size=DRAWN,
        root_name="root",
    )
    return grade(fn, exercise, world_sizes)


def scatter(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, tensors, out, root)``: entry r of the root's list to ``out`` of rank r.

    ``tensors`` is a list of P tensors on the root, None elsewhere. Target: the root sends P - 1
    messages of S bytes, one to each; the others send nothing.
    """
    exercise = Exercise(
        "collectives.scatter",
        signature="comm, tensors, out, root",
        inputs=_shares_and_out,
        expected=_share,
        written=1,
        target=_scatter_target,
        mistakes={
            "scatter.unchanged": lambda rank, case: case.tensor(rank),
            "scatter.first": lambda rank, case: _share(0, case),
            "scatter.root": lambda rank, case: _share(case.root, case),
            "scatter.next": lambda rank, case: _share(rank + 1, case),
            "scatter.before": lambda rank, case: _share(rank - 1, case),
            "scatter.reversed": lambda rank, case: _share(-1 - rank, case),
        },
        library=collectives.scatter,
        drawn_size=DRAWN,
        root_name="root",
    )
    return grade(fn, exercise, world_sizes)


def barrier(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm)``: no rank leaves it before every rank has entered it.

    Every rank enters late once, and the others have to wait for it. How late depends on how long
    the function takes if no rank is late, so that sleeping does not pass for waiting. The barrier
    has to be made of messages; their number is not judged.
    """
    return returns(
        fn,
        name="collectives.barrier",
        inputs=lambda rank, case: (case.root,),
        call=_come_late,
        judge=_left_too_early,
        root_name="late rank",
        may_call=frozenset(),
        world_sizes=world_sizes,
    )


def _of_all_ranks(cost_of: Callable[..., Cost], case: Case) -> Target:
    ranks = range(case.world_size)
    costs = [cost_of(case.size, 4, case.world_size, rank, case.root) for rank in ranks]
    return Target(sum(cost.messages for cost in costs), sum(cost.num_bytes for cost in costs))


def _gathered(rank: int, case: Case, order: Iterable[int]) -> list[Tensor] | None:
    return [case.tensor(r) for r in order] if rank == case.root else None


def _one_buffer(rank: int, case: Case) -> list[Tensor] | None:
    last = max(set(range(case.world_size)) - {case.root})
    ranks = range(case.world_size)
    return _gathered(rank, case, [r if r == case.root else last for r in ranks])


def _root_first(rank: int, case: Case) -> list[Tensor] | None:
    return _gathered(rank, case, sorted(range(case.world_size), key=lambda r: (r != case.root, r)))


def _share(rank: int, case: Case) -> Tensor:
    """What the root has for ``rank`` (mod P)."""
    return case.tensor(100 + rank % case.world_size)


def _shares_and_out(rank: int, case: Case) -> tuple:
    shares = [_share(r, case) for r in range(case.world_size)]
    return shares if rank == case.root else None, case.tensor(rank), case.root


def _scatter_target(rank: int, case: Case) -> Target:
    peers = set(range(case.world_size)) - {rank} if rank == case.root else ()
    return case.target(scatter_cost, rank, case.root, peers=peers)


class _Passed(NamedTuple):
    """How one rank went through the barrier, on the clock that one machine's processes share."""

    entered_s: float
    left_s: float
    messages: int
    borrowed: int


def _come_late(fn: Callable, comm: Comm, late: int) -> _Passed:
    messages, barriers = comm.messages, comm.session.barriers
    began_s = time.monotonic()
    fn(comm)
    took_s = time.monotonic() - began_s
    if comm.rank == late:
        time.sleep(_LATE_S + min(2 * took_s, _MOST_LATE_S))
    entered_s = time.monotonic()
    fn(comm)
    left_s, borrowed = time.monotonic(), comm.session.barriers - barriers
    return _Passed(entered_s, left_s, comm.messages - messages, borrowed)


def _left_too_early(case: Case, values: list[Any]) -> Mistake | None:
    entered_s, left_s, messages, borrowed = zip(*values)
    last_entered_s = max(entered_s)
    early = [rank for rank, s in enumerate(left_s) if s < last_entered_s]
    if early:
        id = "barrier.alone" if len(early) >= case.world_size - 1 else "barrier.some"
        absent = entered_s.index(last_entered_s)
        return Mistake(id, early=early[0], absent=absent, count=len(early))
    return None if any(messages) and not any(borrowed) else Mistake("barrier.borrowed")
