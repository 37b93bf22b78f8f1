"""Answers to ``check.staleness``."""

import bisect
import itertools

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from labkit.schedules.staleness import in_time
from workbook import check

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
    """Every worker to its end: worker 1 begins when the others have ended, and is waited for."""
    for worker in workers_of(comm):
        for _ in range(worker):
            parameters[:] = parameters - comm.recv(torch.empty_like(parameters), worker)
            comm.send(parameters, worker)


def serve_from_a_set(comm, parameters, num_updates):
    """Stops to listen to a worker that is done."""
    left = [worker for worker in workers_of(comm) for _ in range(worker)]
    while left:
        gradient = parameters.new_zeros(parameters.shape)
        worker = comm.recv_any(gradient, set(left))
        left.remove(worker)
        parameters.sub_(gradient)
        comm.send(parameters, dst=worker)


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


def answers_first(comm, parameters, num_updates):
    gradient = torch.empty_like(parameters)
    for _ in range(num_updates):
        worker = comm.recv_any(gradient, workers_of(comm))
        comm.send(parameters, worker)
        parameters -= gradient


def variant(update=lambda p, g, n: p.sub_(g), answer=lambda p: p):
    def fn(comm, parameters, num_updates):
        gradient = torch.empty_like(parameters)
        for _ in range(num_updates):
            worker = comm.recv_any(gradient, workers_of(comm))
            update(parameters, gradient, comm.world_size - 1)
            if answer:
                comm.send(answer(parameters), worker)

    return fn


WRONG_SERVERS = [
    (serve_one_after_another, "run.stuck"),
    (variant(answer=None), "run.stuck"),
    (answers_first, "async.answered_first"),
    (variant(lambda p, g, n: p.add_(g)), "async.wrong_sign"),
    (variant(lambda p, g, n: p.sub_(g / n)), "async.averaged"),
    (variant(lambda p, g, n: p - g), "async.unchanged"),
    (variant(lambda p, g, n: p.sub_(g).sub_(g[0])), "async.ended"),
    (variant(answer=lambda p: p * 3), "async.own"),
    (answers_from_before_the_last, "async.answered_first"),
    (all_updates_in_a_new_tensor, "async.unchanged"),
    (variant(lambda p, g, n: p.sub_(0.75 * g)), "async.ended"),
]


# One push


def push(comm, parameters, worker):
    gradient = torch.empty_like(parameters)
    comm.recv(gradient, worker)
    parameters -= gradient
    comm.send(parameters, worker)


def push_by_recv_any(comm, parameters, worker):
    gradient = torch.empty(len(parameters))
    assert comm.recv_any(gradient, [worker]) == worker
    parameters.add_(gradient, alpha=-1)
    comm.send(parameters, dst=worker)


def push_in_numpy(comm, parameters, worker):
    parameters.numpy()[:] -= comm.recv(torch.zeros_like(parameters), worker).numpy()
    comm.send(parameters, worker)


def push_a_copy(*, worker, comm, parameters):
    kept = parameters.clone()
    gradient = comm.recv(parameters, worker)
    parameters.copy_(kept - gradient)
    comm.send(parameters.clone(), worker)


def push_added(comm, parameters, worker):
    """Receives into the sum: the parameters change their sign twice."""
    parameters.neg_()
    comm.recv_add(parameters, worker)
    parameters.neg_()
    comm.send(parameters, worker)


def push_and_return(comm, parameters, worker):
    new = parameters - comm.recv(torch.empty_like(parameters), src=worker)
    for place, value in enumerate(new.tolist()):
        parameters[place] = value
    comm.send(new, worker)
    return new


def one_push(update=lambda p, g, n: p.sub_(g), answer=lambda p, g: p, first=False):
    def fn(comm, parameters, worker):
        gradient = comm.recv(torch.empty_like(parameters), worker)
        if first:
            comm.send(parameters, worker)
        update(parameters, gradient, comm.world_size - 1)
        if not first:
            comm.send(answer(parameters, gradient), worker)

    return fn


def push_in_silence(comm, parameters, worker):
    parameters -= comm.recv(torch.empty_like(parameters), worker)


WRONG_PUSHES = [
    (push_in_silence, "run.stuck"),
    (one_push(first=True), "async.answered_first"),
    (one_push(lambda p, g, n: p.add_(g)), "async.wrong_sign"),
    (one_push(lambda p, g, n: p.sub_(g / n)), "async.averaged"),
    (one_push(lambda p, g, n: p - g), "async.unchanged"),
    (one_push(lambda p, g, n: p.copy_(-g)), "async.ended"),
    (one_push(answer=lambda p, g: g), "async.own"),
]


# A server that mistrusts late gradients


def serve_gently(comm, parameters, num_updates):
    gradient, workers = torch.empty_like(parameters), range(1, comm.world_size)
    pulled, served = dict.fromkeys(workers, 0), []
    for version in range(num_updates):
        worker = comm.recv_any(gradient, workers)
        late = version - pulled[worker]
        parameters -= gradient / (1 + late)
        comm.send(parameters, worker)
        pulled[worker] = version + 1
        served.append((worker, late))
    return served


def yields_its_books(comm, parameters, num_updates):
    """A generator: nothing happens before it is asked for."""
    ages = dict.fromkeys(workers_of(comm), 0)
    for _ in range(num_updates):
        gradient = torch.zeros(parameters.shape)
        worker = comm.recv_any(gradient, [*ages])
        yield [worker, ages[worker]]
        parameters.sub_(gradient, alpha=1 / (ages[worker] + 1))
        ages = {other: age + 1 for other, age in ages.items()}
        ages[worker] = 0
        comm.send(parameters, worker)


def books_as_a_tensor(comm, parameters, num_updates):
    return torch.tensor(serve_gently(comm, parameters, num_updates))


def books_in_numpy(comm, parameters, num_updates):
    values, gradient = parameters.numpy(), torch.empty_like(parameters)
    books = np.zeros((num_updates, 2), dtype=int)
    pulled = np.zeros(comm.world_size, dtype=int)
    for version, row in enumerate(books):
        row[0] = comm.recv_any(gradient, workers_of(comm))
        row[1] = version - pulled[row[0]]
        values -= gradient.numpy() / (1 + row[1])
        comm.send(torch.from_numpy(values), int(row[0]))
        pulled[row[0]] = version + 1
    return books


def books_from_the_history(comm, parameters, num_updates):
    """Counts the updates since the worker's own last one."""
    served, books = [], []
    while len(served) < num_updates:
        worker = comm.recv_any(gradient := torch.empty_like(parameters), workers_of(comm))
        late = next((k for k, w in enumerate(reversed(served)) if w == worker), len(served))
        parameters[:] = torch.sub(parameters, gradient.div(late + 1))
        comm.send(parameters.clone(), worker)
        served.append(worker)
        books.append((worker, late))
    return tuple(books)


def with_the_tracker_of_events(comm, parameters, num_updates):
    events = [("pull", worker) for worker in workers_of(comm)]
    gradient, books = torch.empty_like(parameters), []
    for _ in range(num_updates):
        worker = comm.recv_any(gradient, {*workers_of(comm)})
        events.append(("push", worker))
        late = staleness_of(events)[-1]
        parameters -= gradient * (1 / (1 + late))
        comm.send(parameters, worker)
        events.append(("pull", worker))
        books.append([torch.tensor(worker), late])
    return books


def gentle(factor=lambda late: 1 / (1 + late), told=lambda late: late, first=False, row=tuple):
    def fn(comm, parameters, num_updates):
        gradient, workers = torch.empty_like(parameters), workers_of(comm)
        pulled, books = dict.fromkeys(workers, 0), []
        for version in range(num_updates):
            worker = comm.recv_any(gradient, workers)
            late = version - pulled[worker]
            if first:
                comm.send(parameters, worker)
            parameters.sub_(factor(late) * gradient)
            if not first:
                comm.send(parameters, worker)
            pulled[worker] = version + 1
            books.append(row((worker, told(late))))
        return books

    return fn


def names_each_worker_once(comm, parameters, num_updates):
    return list(dict(serve_gently(comm, parameters, num_updates)).items())


def says_nothing(comm, parameters, num_updates):
    serve_gently(comm, parameters, num_updates)


WRONG_STEPS = [
    (gentle(factor=lambda late: 1.0), "smaller_steps.full"),
    (gentle(factor=lambda late: 1 / (2 + late)), "smaller_steps.never_full"),
    (gentle(factor=lambda late: 1 + late), "smaller_steps.larger"),
    (gentle(factor=lambda late: 1 / max(1, late)), "smaller_steps.ended"),
    (gentle(factor=lambda late: 0.0), "async.unchanged"),
    (gentle(factor=lambda late: -1 / (1 + late)), "async.wrong_sign"),
    (gentle(told=lambda late: late + 1), "smaller_steps.books", "staleness.itself"),
    (gentle(told=lambda late: 2 * late), "smaller_steps.books", "not staleness.itself"),
    (gentle(first=True), "smaller_steps.pulled"),
    (gentle(row=lambda pair: pair[1]), "smaller_steps.kind"),
    (names_each_worker_once, "smaller_steps.workers"),
    (says_nothing, "smaller_steps.kind"),
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
            serve_from_a_set,
            serve_in_numpy,
            serve_by_recursion,
            serve_and_return,
        ],
        WRONG_SERVERS,
    ),
    Answers(
        check.staleness.push,
        [push, push_by_recv_any, push_in_numpy, push_a_copy, push_added, push_and_return],
        WRONG_PUSHES,
    ),
    Answers(
        check.staleness.smaller_steps,
        [
            serve_gently,
            yields_its_books,
            books_as_a_tensor,
            books_in_numpy,
            books_from_the_history,
            with_the_tracker_of_events,
        ],
        WRONG_STEPS,
    ),
]
