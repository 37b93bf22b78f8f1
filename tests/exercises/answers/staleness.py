"""Answers to ``check.staleness``."""

from functools import partial

import numpy as np
import torch
from graded import Answers, ends

from workbook import check


def staleness_of(events):
    version, pulled, late = 0, {}, []
    for kind, worker in events:
        if kind == "pull":
            pulled[worker] = version
        else:
            late.append(version - pulled[worker])
            version += 1
    return late


def may_apply(worker, version, pulled, bound, newest_first=False):
    others = [pulled[other] for other in pulled if other != worker]
    ordered = sorted(others, reverse=newest_first)
    return all(version + 1 + k - v <= bound for k, v in enumerate(ordered))


def workers_of(comm):
    return range(1, comm.world_size)


# server(comm, parameters, num_updates)


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
            push(comm, parameters, worker)


# push(comm, parameters, worker)


def push(comm, parameters, worker, answer=lambda p, g: p):
    gradient = comm.recv(torch.empty_like(parameters), worker)
    parameters -= gradient
    comm.send(answer(parameters, gradient), worker)


ANSWERS = [
    Answers(
        check.staleness.bookkeeping,
        [lambda events: np.array(staleness_of(events))],
        [
            lambda events: [late + 1 for late in staleness_of(events)],
            lambda events: [i for i, (kind, _) in enumerate(events) if kind == "push"],
        ],
    ),
    Answers(
        check.staleness.admission,
        [may_apply],
        [
            lambda worker, version, pulled, bound: True,
            partial(may_apply, newest_first=True),
        ],
    ),
    Answers(
        check.staleness.server,
        [serve],
        [
            ends(serve_one_after_another),
            lambda comm, parameters, num_updates: serve(comm, parameters.clone(), num_updates),
        ],
    ),
    Answers(
        check.staleness.push,
        [push],
        [
            partial(push, answer=lambda p, g: g),
            partial(push, answer=lambda p, g: p + g),
        ],
    ),
]
