"""Page 05: an asynchronous server, staleness and its bound.

On real ranks, the workers are this module's code. How often each pushes is drawn, and one of them
begins when all others have ended, so that a server which waits for it first never ends.

Symbols: W workers, P = W + 1 ranks, V the parameters' version.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from labkit.engine.comm.comm import Comm
from labkit.schedules.staleness import StalenessTracker, can_keep_bound
from workbook.exercises.grader import Case, Check, Target, solved
from workbook.exercises.grader.compare import beside
from workbook.exercises.grader.exercise import Found

Event = tuple[str, int]


def _drawn_events(random: Random) -> list[tuple[list[Event]]]:
    """A worker may push twice after one pull."""
    cases = []
    for count in (4, 8, 20):
        events = [("pull", 7), ("pull", 2), ("pull", 3)]
        for _ in range(count):
            kind = random.choice(("pull", "push"))
            worker = random.choice((2, 3, 7))
            events.append((kind, worker))
        cases.append((events,))
    return cases


def _with_pulls(events: Sequence[Event]) -> list[Event]:
    """The same events, each push followed by a pull of its worker."""
    more_events = []
    for kind, worker in events:
        more_events.append((kind, worker))
        if kind == "push":
            more_events.append(("pull", worker))
    return more_events


# In the first the workers take turns.
@solved(
    ([("pull", 1), ("push", 1), ("pull", 2), ("push", 2)],),
    ([("pull", 1), ("pull", 2), ("push", 2), ("push", 1)],),
    more=_drawn_events,
    mistakes={
        "one version is stored for all workers, but each pulls at a different time": (
            lambda staleness, events: staleness([(kind, 0) for kind, _ in events])
        ),
        "a push is not late by its own update": (
            lambda staleness, events: [late + 1 for late in staleness(events)]
        ),
        "a push brings no new parameters to its worker, only a pull does": (
            lambda staleness, events: staleness(_with_pulls(events))
        ),
    },
)
def bookkeeping(events: Sequence[Event]) -> list[int]:
    """Grade ``fn(events)``: the staleness of every push, from a server's list of events."""
    tracker = StalenessTracker({worker for _, worker in events})
    for kind, worker in events:
        if kind == "pull":
            tracker.pull(worker)
        else:
            tracker.push(worker)
            tracker.apply(worker)
    return [update.staleness for update in tracker.updates]


def _drawn_pushes(random: Random) -> list[tuple[int, int, dict[int, int], int]]:
    """The pushing worker, V, {worker: the version that it has pulled}, the bound."""
    cases = []
    for version, count in itertools.product((0, 2, 3), (3, 2)):
        for pulled in itertools.product((3, 2, 1, 0), repeat=count):
            for bound in (2, 3, 4):
                # A server that follows the rule meets no worker that is too late already.
                if max(pulled) <= version and can_keep_bound(pulled, version, bound):
                    worker = random.randint(1, count)
                    cases.append((worker, version, dict(enumerate(pulled, start=1)), bound))
    return cases


@solved(
    more=_drawn_pushes,
    mistakes={
        "the rule looks only one update ahead: of two equally stale workers, one has to push "
        "after the other": (
            lambda may, w, V, pulled, bound: all(may(w, V, {o: pulled[o]}, bound) for o in pulled)
        ),
        "the pushing worker has finished its gradient: only the others still have to push": (
            lambda may, w, V, pulled, bound: may(0, V, pulled, bound)
        ),
        "the others have to be in time after this push, when the version is V + 1": (
            lambda may, w, V, pulled, bound: may(w, V - 1, pulled, bound)
        ),
    },
)
def admission(worker: int, version: int, pulled: Mapping[int, int], bound: int) -> bool:
    """Grade ``fn(worker, version, pulled, bound)``: whether a push may be applied now.

    ``pulled`` holds the version from which each worker computes its current gradient.
    """
    others = [pulled[other] for other in pulled if other != worker]
    return can_keep_bound(others, version + 1, bound)


class _Plan:
    """The workers' turns, the last one's when the others have ended; by worker what it pushes."""

    def __init__(self, case: Case):
        W = case.world_size - 1
        self.workers = (case.random(1, W).argsort() + 1).tolist()
        self.pushes = dict(zip(self.workers, range(W, 0, -1)))
        self.steps = {w: case.integer(w, 3, 9) / 2 for w in self.workers}


def _arguments(rank: int, case: Case) -> tuple:
    """Zeros [W], the number of pushes, the seconds that a worker needs for a gradient, a plan."""
    plan = _Plan(case)
    num_updates = sum(plan.pushes.values())
    pause_s = 0.02 * case.size
    return (torch.zeros(case.world_size - 1), num_updates, pause_s, plan)


def _one_message_per_push(rank: int, case: Case) -> Target:
    plan = _Plan(case)
    pushes = plan.pushes.get(rank, sum(plan.pushes.values()))
    # A worker that has ended sends an empty message to the last one.
    tokens = rank in plan.workers[:-1] and not case.size
    return Target(pushes + tokens, 4 * pushes * (case.world_size - 1))


def _serve_and_work(
    fn: Callable, comm: Comm, parameters: Tensor, num_updates: int, pause_s: float, plan: _Plan
) -> list:
    """Rank 0: the parameters at the end. A worker: its pulls."""
    if comm.rank == 0:
        fn(comm, parameters, num_updates)
        return parameters.tolist()
    token = torch.empty(0)
    *first_workers, last = plan.workers
    if comm.rank == last and not pause_s:
        for worker in first_workers:
            comm.recv(token, worker)
    pulled = []
    # Element w - 1 of the parameters counts the updates of worker w.
    gradient = torch.zeros_like(parameters)
    gradient[comm.rank - 1] = plan.steps[comm.rank]
    for _ in range(plan.pushes[comm.rank]):
        if pause_s:
            with comm.span("compute"):
                time.sleep(pause_s * (3 if comm.rank == last else 1))
        comm.send(gradient, 0)
        pulled.append(comm.recv(torch.empty_like(parameters), 0).tolist())
    if comm.rank != last and not pause_s:
        comm.send(token, last)
    return pulled


def _judge_server(case: Case, values: list[Any]) -> Found:
    plan = _Plan(case)
    workers = range(1, case.world_size)
    end = values[0]
    expected = [-plan.steps[worker] * plan.pushes[worker] for worker in workers]
    if end != expected:
        text = f"the parameters end as {beside(end, expected)}"
        return text if any(end) else f"{text}\nsubtract each gradient in place"
    for worker in workers:
        elements = [pulled[worker - 1] for pulled in values[worker]]
        expected = [-plan.steps[worker] * (n + 1) for n in range(plan.pushes[worker])]
        if elements != expected:
            text = f"element {worker - 1} of what worker {worker} pulls is {elements}, expected "
            if elements == [plan.steps[worker]] * plan.pushes[worker]:
                return f"{text}{expected}\nthat is its gradient, not the parameters"
            return f"{text}{expected}\neach answer has to hold the update before it"
    return None


_check = partial(
    Check,
    signature="comm, parameters, num_updates",
    inputs=_arguments,
    written=None,
    call=_serve_and_work,
    target=_one_message_per_push,
    sizes=(),
)


def _by_turns(fn: Callable, comm: Comm, *args: Any) -> list:
    """The server takes turns with the workers, the last one at the end."""
    *_, plan = args

    def serve(comm: Comm, parameters: Tensor, num_updates: int) -> None:
        for turn in range(comm.world_size):
            for worker in plan.workers[:-1]:
                if turn < plan.pushes[worker]:
                    fn(comm, parameters, worker)
        fn(comm, parameters, plan.workers[-1])

    return _serve_and_work(serve, comm, *args)


# On rank 0: receive a gradient [W], subtract it in place, and send ``parameters``.
push = _check(
    "staleness.push", signature="comm, parameters, worker", call=_by_turns, judge=_judge_server
)
# The same for any worker that comes.
server = _check(
    "staleness.server",
    judge=_judge_server,
    drawn_size=1,
    stuck={
        "rank 0 is in recv,": "the server waits for one worker, though others may be there",
        "rank 0 has returned": "the server ends before it has made num_updates updates",
    },
)
