"""Answers to ``check.staleness``."""

import bisect
import itertools

import numpy as np
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


def one_by_one(events):
    """A generator."""
    version, pulled = 0, {}
    for kind, worker in events:
        if kind == "push":
            yield version - pulled[worker]
            version += 1
        else:
            pulled[worker] = version


def in_an_array(events):
    pushes = np.cumsum([kind == "push" for kind, _ in events])
    late = []
    for place, (kind, worker) in enumerate(events):
        if kind == "push":
            last = max(i for i in range(place) if events[i] == ("pull", worker))
            late.append(pushes[place] - 1 - pushes[last])
    return np.array(late)


def in_a_tensor(events):
    return torch.tensor(staleness_of(events))


def by_recursion(events, version=0, pulled=()):
    if not events:
        return ()
    (kind, worker), *rest = events
    if kind == "pull":
        return by_recursion(rest, version, (*pulled, (worker, version)))
    return (version - dict(pulled)[worker], *by_recursion(rest, version + 1, pulled))


def counts_down(events):
    """Every push ages the gradients that are under way, and takes its own out of its list."""
    ages, late = {}, []
    for kind, worker in events:
        if kind == "pull":
            ages[worker] = 0
            continue
        late.append(ages[worker])
        ages = {other: age + 1 for other, age in ages.items()}
    return late


def uses_up_its_argument(events):
    version, pulled, late = 0, {}, []
    while events:
        kind, worker = events.pop(0)
        if kind == "pull":
            pulled[worker] = version
        else:
            late.append(np.int64(version - pulled[worker]))
            version += 1
    return late


def one_short(events):
    return staleness_of(events)[:-1]


def first_history_only(events, kept=[]):  # noqa: B006
    if not kept:
        kept.extend(staleness_of(events))
    return kept


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
    (one_short, "answer.wrong"),
    (first_history_only, "answer.wrong"),
    (lambda events: [max(0, late - 1) for late in staleness_of(events)], "answer.wrong"),
    (lambda events: None, "answer.nothing"),
]


# The rule of a bound


def others(worker, pulled):
    return [version for other, version in pulled.items() if other != worker]


def may_apply(worker, version, pulled, bound):
    oldest_first = sorted(others(worker, pulled))
    return all(version + 1 + k - v <= bound for k, v in enumerate(oldest_first))


def with_a_counter(worker, version, pulled, bound):
    """By deadlines: at most d of the others may have to come within the next d updates."""
    times_left = [bound - (version + 1 - v) for v in others(worker, pulled)]
    return min(times_left) >= 0 and all(
        sum(left < d for left in times_left) <= d for d in range(1, len(times_left) + 1)
    )


def by_every_order(worker, version, pulled, bound):
    """Whether any order of the others is in time."""
    orders = itertools.permutations(others(worker, pulled))
    return any(all(version + 1 + k - v <= bound for k, v in enumerate(o)) for o in orders)


def in_numpy(worker, version, pulled, bound):
    oldest_first = np.sort(others(worker, pulled))
    return np.all(version + 1 + np.arange(len(oldest_first)) - oldest_first <= bound)


def in_torch(worker, version, pulled, bound):
    oldest_first = torch.tensor(others(worker, pulled)).sort().values
    return (version + 1 + torch.arange(len(oldest_first)) - oldest_first <= bound).all()


def as_a_number(worker, version, pulled, bound):
    return int(may_apply(worker, version, pulled, bound))


def keeps_them_sorted(worker, version, pulled, bound):
    queue = []
    for other in pulled:
        if other != worker:
            bisect.insort(queue, pulled[other])
    while queue:
        version += 1
        if version - queue.pop(0) > bound:
            return False
    return True


def two_ahead(worker, version, pulled, bound):
    """Looks at the oldest and the newest only: right for two others, wrong for more or fewer."""
    oldest, *_, newest = sorted(others(worker, pulled))
    return version + 1 - oldest <= bound and version + 1 - newest <= bound


def own_is_oldest(worker, version, pulled, bound):
    return pulled[worker] == min(pulled.values())


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
    (two_ahead, "not answer.raised"),
    (own_is_oldest, "answer.wrong"),
    (lambda w, version, pulled, bound: None, "answer.nothing"),
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


def serve_in_order_of_arrival(comm, parameters, num_updates):
    """Forgets who is done, and makes a new tensor for each gradient."""
    left = {worker: worker for worker in workers_of(comm)}
    while left:
        gradient = torch.zeros(parameters.shape)
        worker = comm.recv_any(gradient, list(left))
        parameters.add_(gradient, alpha=-1)
        comm.send(parameters.clone(), worker)
        left[worker] -= 1
        if not left[worker]:
            del left[worker]


def serve_one_after_another(comm, parameters, num_updates):
    """Every worker to its end: right here, where a worker never waits for another."""
    for worker in workers_of(comm):
        for _ in range(worker):
            parameters[:] = parameters - comm.recv(torch.empty_like(parameters), worker)
            comm.send(parameters, worker)


def serve_in_numpy(comm, parameters, num_updates):
    values, gradient = parameters.numpy(), torch.empty_like(parameters)
    for _ in range(num_updates):
        worker = comm.recv_any(gradient, {*workers_of(comm)})
        values -= gradient.numpy()
        comm.send(torch.from_numpy(values), worker)


def serve_by_recursion(comm, parameters, num_updates):
    if num_updates:
        gradient = torch.empty_like(parameters)
        worker = comm.recv_any(gradient, workers_of(comm))
        torch.sub(parameters, gradient, out=parameters)
        comm.send(parameters, worker)
        serve_by_recursion(comm, parameters, num_updates - 1)


def serve_and_return(comm, parameters, num_updates):
    gradients = {worker: torch.empty(len(parameters)) for worker in workers_of(comm)}
    pushes = 0
    while pushes != num_updates:
        buffer = torch.empty_like(parameters)
        worker = comm.recv_any(buffer, gradients)
        gradients[worker].copy_(buffer)
        parameters.copy_(parameters - gradients[worker])
        comm.send(parameters, worker)
        pushes += 1
    return parameters


def answers_from_before_the_last(comm, parameters, num_updates):
    """Each worker gets the parameters as another worker's push left them."""
    gradient, last = torch.empty_like(parameters), parameters.clone()
    for _ in range(num_updates):
        worker = comm.recv_any(gradient, workers_of(comm))
        comm.send(last, worker)
        parameters -= gradient
        last = parameters.clone()


def all_updates_in_a_new_tensor(comm, parameters, num_updates):
    values, gradient = parameters.clone(), torch.empty_like(parameters)
    for _ in range(num_updates):
        worker = comm.recv_any(gradient, workers_of(comm))
        values -= gradient
        comm.send(values, worker)
    return values


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
    (answers_from_before_the_last, "async.answered_first"),
    (all_updates_in_a_new_tensor, "async.unchanged"),
    (variant(lambda p, g, n: p.sub_(0.75 * g)), "async.ended"),
]


def takes_its_own_out(worker, version, pulled, bound):
    """Right, although it changes its argument."""
    del pulled[worker]
    return in_time(pulled.values(), version + 1, bound)


ANSWERS = [
    Answers(
        check.staleness.bookkeeping,
        [
            staleness_of,
            one_by_one,
            in_an_array,
            in_a_tensor,
            by_recursion,
            counts_down,
            uses_up_its_argument,
        ],
        WRONG_BOOKS,
    ),
    Answers(
        check.staleness.admission,
        [
            may_apply,
            takes_its_own_out,
            with_a_counter,
            by_every_order,
            in_numpy,
            in_torch,
            as_a_number,
            keeps_them_sorted,
        ],
        WRONG_RULES,
    ),
    Answers(
        check.staleness.server,
        [
            serve,
            serve_in_order_of_arrival,
            serve_one_after_another,
            serve_in_numpy,
            serve_by_recursion,
            serve_and_return,
        ],
        WRONG_SERVERS,
    ),
]
