"""Page 05: an asynchronous server, staleness and its bound.

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
from labkit.schedules.servers import in_time
from workbook.exercises.grader import WORLD_SIZES, Case, Target, Verdict, answers, returns
from workbook.exercises.grader.compare import plain, same, short
from workbook.exercises.grader.exercise import Found

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

    ``events`` are ("pull", worker) and ("push", worker) in their order. Runs in another process.
    """
    return answers(
        fn,
        [((list(events),), _staleness(events)) for events in _HISTORIES],
        name="staleness.bookkeeping",
        signature="events",
        mistakes={
            "each push counts its own update, too": (
                lambda events: [late + 1 for late in _staleness(events)]
            ),
            "a gradient is as old as the worker's latest pull, not as its latest push": partial(
                _staleness, since="push"
            ),
            "one version is stored for all workers, but each pulls at a different time": (
                lambda events: _staleness((kind, 0) for kind, _ in events)
            ),
        },
    )


def _staleness(events: Iterable[Event], since: str = "pull") -> list[int]:
    """Of every push: the updates since its worker's latest ``since``."""
    version, seen, late = 0, dict[int, int](), []
    for kind, worker in events:
        if kind == "push":
            late.append(version - seen.get(worker, 0))
            version += 1
        if kind == since:
            seen[worker] = version
    return late


def admission(fn: Callable) -> Verdict:
    """Grade ``fn(worker, version, pulled, bound)``: whether a push may be applied now.

    ``pulled`` holds the version from which each worker, the pushing one included, computes its
    current gradient. Runs in another process.
    """

    def others(worker: int, pulled: Mapping[int, int]) -> list[int]:
        return [version for other, version in pulled.items() if other != worker]

    def may(worker: int, version: int, pulled: Mapping[int, int], bound: int) -> bool:
        return in_time(others(worker, pulled), version + 1, bound)

    return answers(
        fn,
        [(args, may(*args)) for args in _SITUATIONS],
        name="staleness.admission",
        signature="worker, version, pulled, bound",
        mistakes={
            "the rule looks only one update ahead: of two equally stale workers, one has to push "
            "after the other": (
                lambda w, V, pulled, bound: all(V + 1 - v <= bound for v in others(w, pulled))
            ),
            "a staleness equal to the bound is allowed": (
                lambda w, V, pulled, bound: may(w, V, pulled, bound - 1)
            ),
            "the pushing worker has finished its gradient: only the others still have to push": (
                lambda w, V, pulled, bound: in_time(pulled.values(), V + 1, bound)
            ),
        },
    )


def push(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, parameters, worker)``: one push of ``worker``, on rank 0.

    It has to receive a gradient [W], change ``parameters`` [W] in place to parameters - gradient,
    and send them to the worker. Target: one message per push.
    """

    def push_by_push(fn: Callable, comm: Comm, parameters: Tensor) -> Any:
        """Rank 0 serves the last worker first, in turns as long as each has pushes."""
        if comm.rank:
            return _work(comm, parameters)
        workers = range(comm.world_size - 1, 0, -1)
        for turn in range(comm.world_size - 1):
            for worker in workers[: len(workers) - turn]:
                fn(comm, parameters, worker)
        return parameters.tolist()

    return returns(
        fn,
        name="staleness.push",
        signature="comm, parameters, worker",
        inputs=lambda rank, case: (torch.zeros(case.world_size - 1),),
        call=push_by_push,
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

    def judge(case: Case, values: list[Any]) -> Found:
        (books, ended), workers = values[0], range(1, case.world_size)
        if not isinstance(books, list) or not all(_is_pair(row) for row in books):
            return f"expected a list of (worker, staleness), got {short(books)}"
        served = [worker for worker, _ in books]
        if sorted(served) != [worker for worker in workers for _ in range(worker)]:
            return f"the list names the workers {served}: every push has to be in it, once"
        events = [("pull", worker) for worker in workers]
        events += [event for worker in served for event in (("push", worker), ("pull", worker))]
        late, expected = [late for _, late in books], _staleness(events)
        if not same(late, expected):
            text = f"by the order {served} the pushes were {expected} updates late, the list says "
            return text + short(late)
        # The parameters [W] after each update.
        after = [[0.0] * len(workers)]
        for worker, one in zip(served, expected):
            after.append([*after[-1]])
            after[-1][worker - 1] -= 1 / (1 + one)
        if not same(ended, after[-1]):
            return f"the parameters end as {short(ended)}, expected {short(after[-1])}"
        for worker in workers:
            own = [after[n + 1] for n, one in enumerate(served) if one == worker]
            if not same(values[worker], own):
                text = f"worker {worker} pulls {short(values[worker])}, expected {short(own)}"
                return f"{text}: those right after its own update"
        return None

    return returns(
        fn,
        name="staleness.smaller_steps",
        signature="comm, parameters, num_updates",
        inputs=_parameters_and_updates,
        call=partial(_serve_and_work, with_books=True),
        judge=judge,
        target=_one_message_per_push,
        world_sizes=world_sizes,
    )


def _is_pair(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 2


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
        books = plain(fn(comm, parameters, num_updates))
        books = books.tolist() if isinstance(books, Tensor) else books
        if isinstance(books, list):
            books = [row.tolist() if isinstance(row, Tensor) else row for row in books]
        return [books, parameters.tolist()] if with_books else parameters.tolist()
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


def _judge_server(case: Case, values: list[Any]) -> Found:
    workers = range(1, case.world_size)
    expected = [-float(worker) for worker in workers]
    if values[0] != expected:
        same_place = " (in place?)" if not any(values[0]) else ""
        text = f"the parameters end as {values[0]}{same_place}, expected {expected}: "
        return f"{text}each push subtracts its gradient, once"
    for worker in workers:
        own = [-pulled[worker - 1] for pulled in values[worker]]
        if own != [*range(1, worker + 1)]:
            text = f"worker {worker} pulls parameters with {own} of its own updates in them, "
            return f"{text}expected 1, 2, ...: update first, then answer"
    return None
