"""Answers to ``check.staleness``."""

import numpy as np
import torch
from graded import Answers, ends
from ranks import travel_by_value

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


def counts_itself(events):
    return [late + 1 for late in staleness_of(events)]


# The rule of a bound


def others(worker, pulled):
    return [version for other, version in pulled.items() if other != worker]


def may_apply(worker, version, pulled, bound):
    oldest_first = sorted(others(worker, pulled))
    return all(version + 1 + k - v <= bound for k, v in enumerate(oldest_first))


# The server


def workers_of(comm):
    return range(1, comm.world_size)


def serve(comm, parameters, num_updates):
    gradient = torch.empty_like(parameters)
    for _ in range(num_updates):
        worker = comm.recv_any(gradient, workers_of(comm))
        parameters -= gradient
        comm.send(parameters, worker)


def serve_one_after_another(comm, parameters, num_updates):
    """Every worker to its end: worker 1 begins when the others have ended, and is waited for."""
    for worker in workers_of(comm):
        for _ in range(worker):
            parameters[:] = parameters - comm.recv(torch.empty_like(parameters), worker)
            comm.send(parameters, worker)


def serve_half(comm, parameters, num_updates):
    half = parameters.clone()
    serve(comm, half, num_updates)
    parameters += (half - parameters) / 2


# One push


def push(comm, parameters, worker):
    gradient = torch.empty_like(parameters)
    comm.recv(gradient, worker)
    parameters -= gradient
    comm.send(parameters, worker)


def one_push(update=lambda p, g, n: p.sub_(g), answer=lambda p, g: p):
    def fn(comm, parameters, worker):
        gradient = comm.recv(torch.empty_like(parameters), worker)
        update(parameters, gradient, comm.world_size - 1)
        comm.send(answer(parameters, gradient), worker)

    return fn


# A server that mistrusts late gradients


def gentle(factor=lambda late: 1 / (1 + late), told=lambda late: late):
    def fn(comm, parameters, num_updates):
        gradient, workers = torch.empty_like(parameters), workers_of(comm)
        pulled, books = dict.fromkeys(workers, 0), []
        for version in range(num_updates):
            worker = comm.recv_any(gradient, workers)
            late = version - pulled[worker]
            parameters.sub_(factor(late) * gradient)
            comm.send(parameters, worker)
            pulled[worker] = version + 1
            books.append((worker, told(late)))
        return books

    return fn


ANSWERS = [
    Answers(
        check.staleness.bookkeeping,
        [lambda events: np.array(staleness_of(events))],
        [
            counts_itself,
            lambda events: [i for i, (kind, _) in enumerate(events) if kind == "push"],
            lambda events: None,
        ],
    ),
    Answers(
        check.staleness.admission,
        [may_apply],
        [
            lambda w, version, pulled, bound: True,
            lambda w, version, pulled, bound: all(
                version + 1 + k - v <= bound
                for k, v in enumerate(sorted(others(w, pulled), reverse=True))
            ),
            lambda w, version, pulled: True,
        ],
    ),
    Answers(
        check.staleness.server,
        [serve],
        [
            ends(serve_one_after_another),
            serve_half,
        ],
    ),
    Answers(
        check.staleness.push,
        [push],
        [
            one_push(lambda p, g, n: p.sub_(g / n)),
            one_push(answer=lambda p, g: g),
        ],
    ),
    Answers(
        check.staleness.smaller_steps,
        [gentle()],
        [gentle(factor=lambda late: 1.0), gentle(told=lambda late: late + 1)],
    ),
]
