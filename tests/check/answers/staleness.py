"""Answers to ``check.staleness``."""

import torch
from graded import Answers
from ranks import travel_by_value

from labkit import check
from labkit.schedules.staleness import in_time

travel_by_value(__name__)


# From a list of events


def staleness_of(events):
    version, pulled, late = 0, {}, []
    for kind, worker in events:
        if kind == "pull":
            pulled[worker] = version
        else:
            late.append(version - pulled[worker])
            version += 1
    return late


def counts_itself(events):
    return [late + 1 for late in staleness_of(events)]


def since_the_push(events):
    version, pushed, late = 0, {}, []
    for kind, worker in events:
        if kind == "push":
            late.append(version - pushed.get(worker, 0))
            version += 1
            pushed[worker] = version
    return late


def since_the_first_pull(events):
    version, pulled, late = 0, {}, []
    for kind, worker in events:
        if kind == "pull":
            pulled.setdefault(worker, version)
        else:
            late.append(version - pulled[worker])
            version += 1
    return late


def one_for_all(events):
    return staleness_of([(kind, 0) for kind, _ in events])


def counts_pulls(events):
    pulled, late = {}, []
    for number, (kind, worker) in enumerate(events):
        if kind == "push":
            late.append(number - pulled[worker])
        else:
            pulled[worker] = number + 1
    return late


def by_others_only(events):
    since, late = {}, []
    for kind, worker in events:
        if kind == "pull":
            since[worker] = []
        else:
            late.append(sum(other != worker for other in since[worker]))
            for pushes in since.values():
                pushes.append(worker)
    return late


WRONG_BOOKS = [
    (counts_itself, "staleness.itself"),
    (since_the_push, "staleness.since_push"),
    (since_the_first_pull, "staleness.since_first_pull"),
    (one_for_all, "staleness.one_for_all"),
    (counts_pulls, "staleness.pulls"),
    (by_others_only, "staleness.others_only"),
    (lambda events: [i for i, (kind, _) in enumerate(events) if kind == "push"], "answer.wrong"),
    (lambda events: list(range(len(staleness_of(events)))), "staleness.version"),
    (lambda events: {}["worker"], "answer.raised"),
    (lambda events: 3, "answer.wrong"),
    (lambda events: None, "answer.nothing"),
]


# The rule of a bound


def others(worker, pulled):
    return [version for other, version in pulled.items() if other != worker]


def may_apply(worker, version, pulled, bound):
    oldest_first = sorted(others(worker, pulled))
    return all(version + 1 + k - v <= bound for k, v in enumerate(oldest_first))


WRONG_RULES = [
    (lambda w, version, pulled, bound: True, "admission.everything"),
    (lambda w, version, pulled, bound: version - pulled[w] <= bound, "admission.everything"),
    (
        lambda w, version, pulled, bound: all(version + 1 - v <= bound for v in others(w, pulled)),
        "admission.one_ahead",
    ),
    (
        lambda w, version, pulled, bound: may_apply(w, version, pulled, bound - 1),
        "admission.bound_allowed",
    ),
    (
        lambda w, version, pulled, bound: may_apply(w, version - 1, pulled, bound),
        "admission.everything",
    ),
    (
        lambda w, version, pulled, bound: in_time(pulled.values(), version + 1, bound),
        "admission.counts_itself",
    ),
    (
        lambda w, version, pulled, bound: all(
            version + 1 + k - v <= bound
            for k, v in enumerate(sorted(others(w, pulled), reverse=True))
        ),
        "admission.newest_first",
    ),
    (lambda w, version, pulled, bound: False, "answer.wrong"),
    (lambda w, version, pulled: True, "answer.raised"),
]


# The server


def workers_of(comm):
    return range(1, comm.world_size)


def serve(comm, parameters, num_updates):
    gradient = torch.empty_like(parameters)
    for _ in range(num_updates):
        worker = comm.recv_any(gradient, workers_of(comm))
        parameters -= gradient
        comm.send(parameters, worker)


def in_turns(comm, parameters, num_updates):
    gradient = torch.empty_like(parameters)
    for number in range(num_updates):
        worker = 1 + number % (comm.world_size - 1)
        comm.recv(gradient, worker)
        parameters -= gradient
        comm.send(parameters, worker)


def all_then_update(comm, parameters, num_updates):
    gradient = torch.empty_like(parameters)
    for _ in range(num_updates):
        for worker in workers_of(comm):
            comm.recv(gradient, worker)
            parameters -= gradient
        for worker in workers_of(comm):
            comm.send(parameters, worker)


def answers_first(comm, parameters, num_updates):
    gradient = torch.empty_like(parameters)
    for _ in range(num_updates):
        worker = comm.recv_any(gradient, workers_of(comm))
        comm.send(parameters, worker)
        parameters -= gradient


def variant(update=lambda p, g, n: p.sub_(g), sources=workers_of, answer=lambda p: p, rounds=0):
    def fn(comm, parameters, num_updates):
        gradient = torch.empty_like(parameters)
        for _ in range(num_updates + rounds):
            worker = comm.recv_any(gradient, sources(comm))
            update(parameters, gradient, comm.world_size - 1)
            if answer:
                comm.send(answer(parameters), worker)

    return fn


WRONG_SERVERS = [
    (in_turns, "run.stuck"),
    (all_then_update, "run.stuck"),
    (answers_first, "async.answered_first"),
    (variant(answer=None), "run.stuck"),
    (variant(rounds=1), "run.stuck"),
    (variant(rounds=-1), "run.stuck"),
    (variant(sources=lambda comm: range(comm.world_size)), "run.error"),
    (variant(lambda p, g, n: p.add_(g)), "async.wrong_sign"),
    (variant(lambda p, g, n: p.sub_(g / n)), "async.averaged"),
    (variant(lambda p, g, n: p - g), "async.unchanged"),
    (variant(lambda p, g, n: p.sub_(g).sub_(g[0])), "async.ended"),
    (variant(answer=lambda p: p * 3), "async.own"),
]


def takes_its_own_out(worker, version, pulled, bound):
    """Right, although it changes its argument."""
    del pulled[worker]
    return in_time(pulled.values(), version + 1, bound)


ANSWERS = [
    Answers(check.staleness.bookkeeping, [staleness_of], WRONG_BOOKS),
    Answers(check.staleness.admission, [may_apply, takes_its_own_out], WRONG_RULES),
    Answers(check.staleness.server, [serve], WRONG_SERVERS),
]
