"""The checks of page 05: an asynchronous server, staleness and its bound.

On real ranks, worker w pushes w times; the workers are this module's code. Worker 1 begins when
all others have ended, so that a server which waits for it first never ends.

Symbols: W workers, P = W + 1 ranks, V the parameters' version.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.comm.comm import Comm
from labkit.schedules.staleness import in_time
from workbook.exercises.grader import WORLD_SIZES, Case, Mistake, Target, Verdict, answers, returns
from workbook.exercises.grader.compare import plain, same, short

Event = tuple[str, int]

# In the first the workers take turns; in the last a worker pushes twice after one pull.
_HISTORIES = (
    (("pull", 1), ("push", 1), ("pull", 2), ("push", 2)),
    (("pull", 1), ("pull", 2), ("push", 2), ("push", 1)),
    (
        *(("pull", 1), ("pull", 2), ("push", 1), ("pull", 1), ("push", 1), ("pull", 1)),
        *(("push", 2), ("pull", 2), ("push", 1), ("push", 2)),
    ),
    (("pull", 1), ("pull", 2), ("push", 1), ("push", 1), ("push", 2)),
)
# The pushing worker (1), V, {worker: the version that it has pulled}, the bound.
_SITUATIONS = tuple(
    (1, version, dict(enumerate(pulled, start=1)), bound)
    for version in (0, 2, 3)
    for pulled in itertools.product((3, 2, 1, 0), repeat=3)
    for bound in (2, 3, 4)
    # A server that follows the rule meets only situations where no worker is too late already.
    if max(pulled) <= version and in_time(pulled, version, bound)
)


def bookkeeping(fn: Callable) -> Verdict:
    """Grade ``fn(events)``: the staleness of every push, from a server's list of events.

    ``events`` are ("pull", worker) and ("push", worker) in their order. Runs in this process.
    """
    return answers(
        fn,
        [((list(events),), _by_version(events)) for events in _HISTORIES],
        name="staleness.bookkeeping",
        signature="events",
        mistakes=_BOOKKEEPING_MISTAKES,
    )


def admission(fn: Callable) -> Verdict:
    """Grade ``fn(worker, version, pulled, bound)``: whether a push may be applied now.

    ``pulled`` holds the version from which each worker, the pushing one included, computes its
    current gradient. Runs in this process.
    """
    return answers(
        fn,
        [(args, _may(*args)) for args in _SITUATIONS],
        name="staleness.admission",
        signature="worker, version, pulled, bound",
        mistakes=_ADMISSION_MISTAKES,
    )


def push(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, parameters, worker)``: one push of ``worker``, on rank 0.

    It has to receive a gradient [W], change ``parameters`` [W] in place to parameters - gradient,
    and send them to the worker. Target: one message per push.
    """
    return returns(
        fn,
        name="staleness.push",
        signature="comm, parameters, worker",
        inputs=lambda rank, case: (torch.zeros(case.world_size - 1),),
        call=_push_by_push,
        judge=_judge_server,
        target=lambda rank, case: _one_message_per_push(rank, case, has_tokens=False),
        world_sizes=world_sizes,
    )


def server(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, parameters, num_updates)``: rank 0 of an asynchronous parameter server.

    Worker w sends a gradient [W] and receives the parameters [W], w times. Each push has to change
    ``parameters`` [W] in place to parameters - gradient. Target: one message per push.
    """
    return returns(
        fn,
        name="staleness.server",
        signature="comm, parameters, num_updates",
        inputs=_parameters_and_updates,
        call=_serve_and_work,
        judge=_judge_server,
        target=_one_message_per_push,
        drawn_size=1,
        world_sizes=world_sizes,
    )


def smaller_steps(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, parameters, num_updates)``: a server that mistrusts late gradients.

    As in ``server``, but each push changes ``parameters`` to parameters - gradient / (1 + its
    staleness), and expected is the list of (worker, staleness), by push.
    """
    return returns(
        fn,
        name="staleness.smaller_steps",
        signature="comm, parameters, num_updates",
        inputs=_parameters_and_updates,
        call=partial(_serve_and_work, with_books=True),
        judge=_judge_smaller_steps,
        target=_one_message_per_push,
        world_sizes=world_sizes,
    )


# From a list of events


def _by_version(
    events: Iterable[Event],
    *,
    others_only: bool = False,
    since: str = "pull",
    first_pull: bool = False,
    every_event: bool = False,
) -> list[int]:
    """The staleness of every push; each option makes a mistake."""
    version, own, seen, late = 0, {}, {}, []
    for kind, worker in events:
        if kind == "push":
            late.append(version - seen.get(worker, 0) - (own.get(worker, 0) if others_only else 0))
            version += 1
            own[worker] = own.get(worker, 0) + 1
        elif every_event:
            version += 1
        if kind == since and not (first_pull and worker in seen):
            seen[worker], own[worker] = version, 0
    return late


_BOOKKEEPING_MISTAKES: dict[str, Callable[[Iterable[Event]], list[int]]] = {
    "staleness.itself": lambda events: [late + 1 for late in _by_version(events)],
    "staleness.since_push": partial(_by_version, since="push"),
    "staleness.since_first_pull": partial(_by_version, first_pull=True),
    "staleness.one_for_all": lambda events: _by_version((kind, 0) for kind, _ in events),
    "staleness.pulls": partial(_by_version, every_event=True),
    "staleness.others_only": partial(_by_version, others_only=True),
    "staleness.version": lambda events: [*range(sum(kind == "push" for kind, _ in events))],
}


# The rule of a bound


def _others(worker: int, pulled: Mapping[int, int]) -> list[int]:
    return [version for other, version in pulled.items() if other != worker]


def _may(worker: int, version: int, pulled: Mapping[int, int], bound: int) -> bool:
    return in_time(_others(worker, pulled), version + 1, bound)


def _newest_first(worker: int, version: int, pulled: Mapping[int, int], bound: int) -> bool:
    newest_first = sorted(_others(worker, pulled), reverse=True)
    return all(version + 1 + place - v <= bound for place, v in enumerate(newest_first))


# w pushes, V is the version, b the bound.
_ADMISSION_MISTAKES: dict[str, Callable[[int, int, Mapping[int, int], int], bool]] = {
    "admission.everything": lambda w, V, pulled, b: True,
    "admission.one_ahead": (
        lambda w, V, pulled, b: all(V + 1 - v <= b for v in _others(w, pulled))
    ),
    "admission.bound_allowed": lambda w, V, pulled, b: _may(w, V, pulled, b - 1),
    "admission.counts_itself": lambda w, V, pulled, b: in_time(pulled.values(), V + 1, b),
    "admission.newest_first": _newest_first,
}


# The server, on real ranks


def _num_updates(case: Case) -> int:
    return sum(range(1, case.world_size))


def _one_message_per_push(rank: int, case: Case, has_tokens: bool = True) -> Target:
    pushes = rank or _num_updates(case)
    # A worker that has ended sends an empty message to worker 1.
    token = has_tokens and rank > 1 and not case.size
    return Target(pushes + token, 4 * pushes * (case.world_size - 1))


def _parameters_and_updates(rank: int, case: Case) -> tuple:
    """Zeros [W], the number of pushes, and the seconds that a worker needs for a gradient."""
    return torch.zeros(case.world_size - 1), _num_updates(case), 0.02 * case.size


def _serve_and_work(
    fn: Callable,
    comm: Comm,
    parameters: Tensor,
    num_updates: int,
    pause_s: float,
    with_books: bool = False,
) -> Any:
    """Rank 0: the parameters at the end. A worker: what it pulled after each of its pushes."""
    if comm.rank == 0:
        found = fn(comm, parameters, num_updates)
        return [_as_books(found), parameters.tolist()] if with_books else parameters.tolist()
    if pause_s:
        return _work(comm, parameters, pause_s * (3 if comm.rank == 1 else 1))
    token = torch.empty(0)
    for other in range(2, comm.world_size if comm.rank == 1 else 2):
        comm.recv(token, other)
    pulled = _work(comm, parameters)
    if comm.rank > 1:
        comm.send(token, 1)
    return pulled


def _work(comm: Comm, parameters: Tensor, pause_s: float = 0.0) -> list[list[float]]:
    # Place w - 1 of the parameters counts the updates of worker w.
    gradient = torch.zeros_like(parameters)
    gradient[comm.rank - 1] = 1.0
    pulled = []
    for _ in range(comm.rank):
        if pause_s:
            with comm.span("compute"):
                time.sleep(pause_s)
        comm.send(gradient, 0)
        pulled.append(comm.recv(torch.empty_like(parameters), 0).tolist())
    return pulled


def _push_by_push(fn: Callable, comm: Comm, parameters: Tensor) -> Any:
    """Rank 0 serves the last worker first, in turns as long as each has pushes."""
    if comm.rank:
        return _work(comm, parameters)
    workers = range(comm.world_size - 1, 0, -1)
    for turn in range(comm.world_size - 1):
        for worker in workers[: len(workers) - turn]:
            fn(comm, parameters, worker)
    return parameters.tolist()


def _judge_server(case: Case, values: list[Any]) -> Mistake | None:
    workers = range(1, case.world_size)
    ended = values[0]
    due = [-float(worker) for worker in workers]
    if not any(ended):
        return Mistake("async.unchanged")
    if ended == [-update for update in due]:
        return Mistake("async.wrong_sign")
    if ended == [update / len(workers) for update in due] and len(workers) > 1:
        return Mistake("async.averaged")
    if ended != due:
        return Mistake("async.ended", ended=ended, due=due)
    for worker in workers:
        own = [-pulled[worker - 1] for pulled in values[worker]]
        if own == list(range(worker)):
            return Mistake("async.answered_first", worker=worker)
        if own != list(range(1, worker + 1)):
            return Mistake("async.own", worker=worker, own=own)
    return None


def _as_books(found: Any) -> Any:
    """[[worker, staleness], ...] if it is that in any form."""
    found = plain(found)
    rows = found.tolist() if isinstance(found, Tensor) else found
    if not isinstance(rows, list):
        return f"{found!r:.60}"
    rows = [plain(row) for row in rows]
    return [row.tolist() if isinstance(row, Tensor) else row for row in rows]


def _judge_smaller_steps(case: Case, values: list[Any]) -> Mistake | None:
    (books, ended), workers = values[0], range(1, case.world_size)
    if not isinstance(books, list) or not all(_is_pair(row) for row in books):
        return Mistake("smaller_steps.kind", books=f"{books!r:.60}")
    served = [worker for worker, _ in books]
    if sorted(served) != [worker for worker in workers for _ in range(worker)]:
        return Mistake("smaller_steps.workers", served=served)
    events = [("pull", worker) for worker in workers]
    events += [event for worker in served for event in (("push", worker), ("pull", worker))]
    due, late = _by_version(events), [late for _, late in books]
    if not same(late, due):
        mistakes = (id for id, rule in _BOOKKEEPING_MISTAKES.items() if same(late, rule(events)))
        why = next(map(Mistake, mistakes), None)
        return Mistake("smaller_steps.books", why, served=served, late=short(late), due=due)
    after = _states(served, [1 / (1 + one) for one in due], len(workers))
    if not same(ended, after[-1]):
        why = None
        for id, factors in _wrong_factors(due).items():
            if same(ended, _states(served, factors, len(workers))[-1]):
                why = why or Mistake(id)
        return Mistake("smaller_steps.ended", why, ended=short(ended), due=short(after[-1]))
    for worker in workers:
        places = [place for place, one in enumerate(served) if one == worker]
        if not same(values[worker], [after[place] for place in places]):
            return Mistake("smaller_steps.pulled", worker=worker)
    return None


def _is_pair(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 2


def _states(served: Iterable[int], factors: Iterable[float], count: int) -> list[list[float]]:
    """The parameters [W] after each update, if update k is ``factors[k]`` times its gradient."""
    parameters, states = [0.0] * count, []
    for worker, factor in zip(served, factors):
        parameters[worker - 1] -= factor
        states.append([*parameters])
    return states


def _wrong_factors(late: list[int]) -> dict[str, list[float]]:
    return {
        "smaller_steps.full": [1.0] * len(late),
        "smaller_steps.never_full": [1 / (2 + one) for one in late],
        "smaller_steps.larger": [1.0 + one for one in late],
        "async.unchanged": [0.0] * len(late),
        "async.wrong_sign": [-1 / (1 + one) for one in late],
    }
