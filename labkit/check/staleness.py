"""The checks of page 05: staleness from a list of events, the rule of a bound, the server.

Symbols: W workers, P = W + 1 ranks, V the parameters' version.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from labkit.check.grading.core import WORLD_SIZES, grade
from labkit.check.grading.exercise import Case, Exercise, Target
from labkit.check.grading.plain import from_a_stub
from labkit.check.grading.report import NOT_ATTEMPTED, NOT_YET, PASSED, Verdict, no_function, told
from labkit.comm.comm import Comm
from labkit.schedules.staleness import in_time

Event = tuple[str, int]

# In the first everything goes in turn; in the last a worker pushes twice from one pull.
_HISTORIES = (
    (("pull", 1), ("push", 1), ("pull", 2), ("push", 2)),
    (("pull", 1), ("pull", 2), ("push", 2), ("push", 1)),
    (
        *(("pull", 1), ("pull", 2), ("push", 1), ("pull", 1), ("push", 1), ("pull", 1)),
        *(("push", 2), ("pull", 2), ("push", 1), ("push", 2)),
    ),
    (("pull", 1), ("pull", 2), ("push", 1), ("push", 1), ("push", 2)),
)
# (V, {worker: the version it has pulled}, bound); worker 1 pushes.
_SITUATIONS = tuple(
    (version, dict(enumerate(pulled, start=1)), bound)
    for version in (0, 2, 3)
    for pulled in itertools.product((3, 2, 1, 0), repeat=3)
    for bound in (2, 3, 4)
    # Only where nobody is too late already, as a server that keeps to the rule has it.
    if max(pulled) <= version and in_time(pulled, version, bound)
)


def bookkeeping(fn: Callable) -> Verdict:
    """Grade ``fn(events)``: the staleness of every push, from a server's list of events.

    ``events`` are ("pull", worker) and ("push", worker) in their order. Runs in this process.
    """
    return told("staleness.bookkeeping", lambda: _judge_bookkeeping(fn))


def admission(fn: Callable) -> Verdict:
    """Grade ``fn(worker, version, pulled, bound)``: whether a push may be applied now.

    ``pulled`` holds, of every gradient under way (the worker's own too), the version that it is
    computed from. Runs in this process.
    """
    return told("staleness.admission", lambda: _judge_admission(fn))


def server(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, parameters, num_updates)``: rank 0 of an asynchronous parameter server.

    Workers send a gradient [W] and receive the parameters [W], worker w doing so w times.
    ``parameters`` [W] has to become parameters - gradient with each. Target: one message a push.
    """
    exercise = Exercise(
        "staleness.server",
        signature="comm, parameters, num_updates",
        inputs=lambda rank, case: (torch.zeros(case.world_size - 1), _num_updates(case)),
        written=None,
        call=_serve_and_work,
        judge=_judge_server,
        target=_one_message_a_push,
        sizes=(),
    )
    return grade(fn, exercise, world_sizes)


# From a list of events


def _by_version(
    events: Iterable[Event],
    *,
    others_only: bool = False,
    own_too: bool = False,
    since: str = "pull",
    first_pull: bool = False,
    one_for_all: bool = False,
    every_event: bool = False,
) -> list[int]:
    """The staleness of every push; each option is a mistake."""
    version, own, seen, late = 0, {}, {}, []
    for kind, worker in events:
        key = 0 if one_for_all else worker
        if kind == "push":
            late.append(version - seen.get(key, 0) - (own.get(worker, 0) if others_only else 0))
            late[-1] += own_too
            version += 1
            own[worker] = own.get(worker, 0) + 1
        elif every_event:
            version += 1
        if kind == since and not (first_pull and key in seen):
            seen[key], own[worker] = version, 0
    return late


_BOOKKEEPING_MISTAKES = {
    "the update itself is counted, too: staleness is what came before it": {"own_too": True},
    "it counts from the worker's latest push; the parameters are as old as its latest pull": {
        "since": "push"
    },
    "it counts from the worker's first pull: each pull makes the parameters new": {
        "first_pull": True
    },
    "one version is kept for all workers: each has pulled at a time of its own": {
        "one_for_all": True
    },
    "pulls are counted as well: they change no parameters": {"every_event": True},
    "a worker's own update between its pull and its push makes it late as well": {
        "others_only": True
    },
}


def _judge_bookkeeping(fn: Callable) -> Verdict:
    cases = [((list(events),), _by_version(events)) for events in _HISTORIES]
    mistakes = {
        sentence: [_by_version(events, **options) for events in _HISTORIES]
        for sentence, options in _BOOKKEEPING_MISTAKES.items()
    }
    mistakes["it says which version was reached: staleness is how many came since the pull"] = [
        list(range(len(due))) for _, due in cases
    ]
    return _judge("staleness.bookkeeping", fn, cases, mistakes, list)


# The rule of a bound


def _right(worker: int, version: int, pulled: Mapping[int, int], bound: int) -> bool:
    return in_time([v for w, v in pulled.items() if w != worker], version + 1, bound)


def _others(worker: int, pulled: Mapping[int, int]) -> list[int]:
    return [version for other, version in pulled.items() if other != worker]


_ADMISSION_MISTAKES: dict[str, Callable[[int, int, Mapping[int, int], int], bool]] = {
    "that lets everything in: while all others can come in time the pushing worker can, too; the "
    "question is whether they still can once the version is one higher": (
        lambda worker, version, pulled, bound: True
    ),
    "it looks one update ahead; of two that are late alike one has to come after the other": (
        lambda worker, version, pulled, bound: all(
            version + 1 - v <= bound for v in _others(worker, pulled)
        )
    ),
    "a staleness equal to the bound is allowed": (
        lambda worker, version, pulled, bound: in_time(
            _others(worker, pulled), version + 1, bound - 1
        )
    ),
    "the pushing worker is done with its gradient: only the others still have to come": (
        lambda worker, version, pulled, bound: in_time(pulled.values(), version + 1, bound)
    ),
    "the newest is taken first: the oldest has least time left": (
        lambda worker, version, pulled, bound: all(
            version + 1 + place - v <= bound
            for place, v in enumerate(sorted(_others(worker, pulled), reverse=True))
        )
    ),
}


def _judge_admission(fn: Callable) -> Verdict:
    # A dictionary of its own for each call: an answer may take things out of it.
    arguments = [(1, version, dict(pulled), bound) for version, pulled, bound in _SITUATIONS]
    cases = [(args, _right(*args)) for args in arguments]
    mistakes = {
        sentence: [wrong(*args) for args in arguments]
        for sentence, wrong in _ADMISSION_MISTAKES.items()
    }
    return _judge("staleness.admission", fn, cases, mistakes, bool)


def _judge(
    name: str,
    fn: Callable,
    cases: list[tuple[tuple, Any]],
    mistakes: Mapping[str, list],
    kind: Callable[[Any], Any],
) -> Verdict:
    """Call ``fn`` for each case; a wrong one is named if its answers are those of a mistake."""
    if not callable(fn):
        return Verdict(name, NOT_YET, notes=[no_function(fn)])
    answers = []
    for args, _ in cases:
        call = f"{getattr(fn, '__name__', 'yours')}({', '.join(map(repr, args))})"
        try:
            answer = fn(*args)
            if answer is None:
                return Verdict(
                    name, NOT_YET, notes=[f"{call} returned nothing: return the answer"]
                )
            answers.append(kind(answer))
        except Exception as error:
            if from_a_stub(error):
                return Verdict(name, NOT_ATTEMPTED)
            return Verdict(name, NOT_YET, notes=[f"{call} raised {type(error).__name__}: {error}"])
    wrong = [index for index, (_, due) in enumerate(cases) if answers[index] != due]
    if not wrong:
        return Verdict(name, PASSED, notes=[f"all {len(cases)} answers are right"])
    args, due = cases[wrong[0]]
    named = next((sentence for sentence, found in mistakes.items() if found == answers), None)
    note = f"{getattr(fn, '__name__', 'yours')}({', '.join(map(repr, args))}) is {due}, and yours "
    note += f"says {answers[wrong[0]]}" + (f": {named}" if named else "")
    return Verdict(name, NOT_YET, notes=[note])


# The server, on real ranks


def _num_updates(case: Case) -> int:
    return sum(range(1, case.world_size))


def _one_message_a_push(rank: int, case: Case) -> Target:
    pushes = rank or _num_updates(case)
    return Target(pushes, 4 * pushes * (case.world_size - 1))


def _serve_and_work(fn: Callable, comm: Comm, parameters: Tensor, num_updates: int) -> Any:
    """Rank 0: the parameters at the end. A worker: what it pulled after each of its pushes."""
    if comm.rank == 0:
        fn(comm, parameters, num_updates)
        return parameters.tolist()
    # Place w - 1 of the parameters counts the updates of worker w.
    gradient = torch.zeros_like(parameters)
    gradient[comm.rank - 1] = 1.0
    pulled = []
    for _ in range(comm.rank):
        comm.send(gradient, 0)
        pulled.append(comm.recv(torch.empty_like(parameters), 0).tolist())
    return pulled


def _judge_server(case: Case, values: list[Any]) -> str | None:
    workers = range(1, case.world_size)
    ended = values[0]
    due = [-float(worker) for worker in workers]
    if not any(ended):
        return (
            "the parameters have not changed: work in place (parameters -= gradient), since "
            "parameters = parameters - gradient makes a new tensor"
        )
    if ended == [float(worker) for worker in workers]:
        return "the parameters went up: an update goes against the gradient"
    if ended == [-worker / len(workers) for worker in workers] and len(workers) > 1:
        return "each gradient was divided by the number of workers: here a push is an update"
    if ended != due:
        return f"the parameters end as {ended}, where {due} is due: one update a push"
    for worker in workers:
        own = [-pulled[worker - 1] for pulled in values[worker]]
        if own == list(range(worker)):
            return (
                f"worker {worker} pulls parameters from before its own push: update first, then "
                "answer"
            )
        if own != list(range(1, worker + 1)):
            return (
                f"worker {worker} should find 1, 2, ... of its own updates in what it pulls, and "
                f"finds {own}"
            )
    return None
