"""Answers to ``check.pipeline``: what needs no ranks, and the hop."""

import torch
from graded import Answers, ends
from ranks import travel_by_value

from labkit.costs.pipeline_timeline import bubble, bubble_formula
from labkit.schedules.pipeline import Action
from workbook import check

travel_by_value(__name__)


# Micro-batches


def cut(inputs, targets, count):
    count = min(count, len(targets))
    parts = zip(inputs.tensor_split(count), targets.tensor_split(count))
    return [(x, y, len(y) / len(targets)) for x, y in parts]


def weighted(weight, split=torch.tensor_split):
    """Weights by ``weight(size, n, M)``."""

    def fn(inputs, targets, count):
        count = min(count, len(targets))
        parts = list(zip(split(inputs, count), split(targets, count)))
        return [(x, y, weight(len(y), len(targets), len(parts))) for x, y in parts]

    return fn


def empty_ones(inputs, targets, count):
    parts = zip(inputs.tensor_split(count), targets.tensor_split(count))
    return [(x, y, len(y) / len(targets)) for x, y in parts]


# The bubble of a timetable


def idle_of_the_first_stage(slots):
    return bubble([slot for slot in slots if slot.stage == 0])


def by_the_formula(slots):
    """The formula holds for equal stages only."""
    stages, micro_batches = ({getattr(s, of) for s in slots} for of in ("stage", "micro_batch"))
    return bubble_formula(len(stages), len(micro_batches))


# The 1F1B stream


def with_warm_up(ahead):
    """1F1B with a warm-up of ``ahead(stage, P)`` forwards."""

    def fn(stage, P, M):
        warm_up = min(ahead(stage, P), M)
        for micro_batch in range(warm_up):
            yield Action("forward", micro_batch)
        for micro_batch in range(M):
            if micro_batch + warm_up < M:
                yield Action("forward", micro_batch + warm_up)
            yield Action("backward", micro_batch)

    return fn


def forwards_again(stage, P, M):
    ahead = P - 1 - stage
    yield from (f"F{m}" for m in range(ahead))
    yield from (f"{kind}{m}" for m in range(M) for kind in "FB")


def by_recursion(stage, P, M, done=(0, 0)):
    f, b = done
    if b == M:
        return []
    if f < M and f - b < P - stage:
        return [f"F{f}", *by_recursion(stage, P, M, (f + 1, b))]
    return [f"B{b}", *by_recursion(stage, P, M, (f, b + 1))]


# The hop


def carry_out(comm, hop, outgoing, landing):
    if hop.send and hop.recv:
        comm.exchange(outgoing, hop.send.peer, landing, hop.recv.peer)
    elif hop.send:
        comm.send(outgoing, hop.send.peer)
    else:
        comm.recv(landing, hop.recv.peer)


def send_first(comm, hop, outgoing, landing):
    if hop.send:
        comm.send(outgoing, hop.send.peer)
    if hop.recv:
        comm.recv(landing, hop.recv.peer)


def exchange_only(comm, hop, outgoing, landing):
    comm.exchange(outgoing, hop.send.peer, landing, hop.recv.peer)


def through_numpy(comm, hop, outgoing, landing):
    carry_out(
        comm,
        hop,
        outgoing if outgoing is None else torch.from_numpy(outgoing.numpy().copy()),
        landing if landing is None else torch.from_numpy(landing.numpy()),
    )


ANSWERS = [
    Answers(
        check.pipeline.micro_batches,
        [cut],
        [weighted(lambda size, n, M: 1), empty_ones, lambda inputs, targets, count: None],
    ),
    Answers(
        check.pipeline.bubble,
        [bubble],
        [idle_of_the_first_stage, by_the_formula, lambda slots: None],
    ),
    Answers(
        check.pipeline.one_f_one_b,
        [by_recursion],
        [with_warm_up(lambda s, P: 3 - s), forwards_again, 7],
    ),
    Answers(
        check.pipeline.hop,
        [through_numpy],
        [ends(send_first), ends(exchange_only), lambda comm, hop: None],
    ),
]
