"""Answers to ``check.pipeline``: what needs no ranks, and the hop."""

import itertools

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


def busy(slots):
    return sum(slot.end_s - slot.start_s for slot in slots)


def bounds(slots):
    return min(slot.start_s for slot in slots), max(slot.end_s for slot in slots)


def stages_of(slots):
    return max(slot.stage for slot in slots) + 1


def idle_share(slots):
    start_s, end_s = bounds(slots)
    return 1 - busy(slots) / (stages_of(slots) * (end_s - start_s))


def idle_of_the_first_stage(slots):
    start_s, end_s = bounds(slots)
    return 1 - busy([s for s in slots if s.stage == 0]) / (end_s - start_s)


def by_gaps(slots):
    gaps = 0.0
    for stage in range(stages_of(slots)):
        row = sorted((s for s in slots if s.stage == stage), key=lambda s: s.start_s)
        gaps += sum(after.start_s - one.end_s for one, after in itertools.pairwise(row))
    start_s, end_s = bounds(slots)
    return gaps / (stages_of(slots) * (end_s - start_s))


WRONG_BUBBLES = [
    lambda slots: 1 - idle_share(slots),
    lambda slots: idle_share(slots) / (1 - idle_share(slots)),
    lambda slots: idle_share(slots) * stages_of(slots),
    lambda slots: bubble_formula(stages_of(slots), len({s.micro_batch for s in slots})),
    lambda slots: 1 - busy(slots) / (stages_of(slots) * bounds(slots)[1]),
    lambda slots: 1 - busy(slots) / (stages_of(slots) * (slots[-1].end_s - bounds(slots)[0])),
    by_gaps,
    lambda slots: 100 * idle_share(slots),
    lambda slots: 0.25,
    lambda slots: None,
    lambda slots: slots["end_s"],
]


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


def in_words(stage, P, M):
    """Another right answer: a list of strings."""
    return [str(action) for action in with_warm_up(lambda s, P: P - 1 - s)(stage, P, M)]


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


def of_four_stages(stage, P, M):
    """The warm-up of the first size that the check asks about."""
    return with_warm_up(lambda s, P: 3 - s)(stage, P, M)


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
    Answers(check.pipeline.bubble, [bubble], [*WRONG_BUBBLES, idle_of_the_first_stage]),
    Answers(
        check.pipeline.one_f_one_b,
        [by_recursion],
        [of_four_stages, forwards_again, 7],
    ),
    Answers(
        check.pipeline.hop,
        [through_numpy],
        [ends(send_first), ends(exchange_only), lambda comm, hop: None],
    ),
]
