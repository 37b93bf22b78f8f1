"""Answers to ``check.pipeline``."""

import itertools

import torch
from graded import Answers
from ranks import travel_by_value

from labkit import check
from labkit.costs.pipeline_timeline import bubble, bubble_formula
from labkit.schedules.pipeline import Action, gpipe

travel_by_value(__name__)


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


def by_gaps(slots):
    gaps = 0.0
    for stage in range(stages_of(slots)):
        row = sorted((s for s in slots if s.stage == stage), key=lambda s: s.start_s)
        gaps += sum(after.start_s - one.end_s for one, after in itertools.pairwise(row))
    start_s, end_s = bounds(slots)
    return gaps / (stages_of(slots) * (end_s - start_s))


WRONG_BUBBLES = [
    (lambda slots: 1 - idle_share(slots), "bubble.work"),
    (lambda slots: idle_share(slots) / (1 - idle_share(slots)), "bubble.of_working"),
    (lambda slots: idle_share(slots) * stages_of(slots), "bubble.of_step"),
    (
        lambda slots: bubble_formula(stages_of(slots), len({s.micro_batch for s in slots})),
        "bubble.formula",
    ),
    (
        lambda slots: 1 - busy(slots) / (stages_of(slots) * bounds(slots)[1]),
        "bubble.from_zero",
    ),
    (
        lambda slots: 1 - busy(slots) / (stages_of(slots) * (slots[-1].end_s - bounds(slots)[0])),
        "bubble.last_in_list",
    ),
    (by_gaps, "bubble.inner_gaps"),
    (lambda slots: 100 * idle_share(slots), "bubble.percent"),
    (
        lambda slots: 0.25,
        "bubble.differs",
        "4 micro-batches, the bubble is 0.3333, but the function returned 0.25",
    ),
    (lambda slots: None, "answer.nothing"),
    (lambda slots: slots["end_s"], "answer.raised"),
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


def without_min(stage, P, M):
    ahead = P - 1 - stage
    yield from (Action("forward", m) for m in range(ahead))
    for micro_batch in range(M):
        if micro_batch + ahead < M:
            yield Action("forward", micro_batch + ahead)
        yield Action("backward", micro_batch)


def without_drain(stage, P, M):
    for action in in_words(stage, P, M):
        if action[0] == "F" or int(action[1:]) < M - (P - 1 - stage):
            yield action


def forwards_again(stage, P, M):
    ahead = P - 1 - stage
    yield from (f"F{m}" for m in range(ahead))
    yield from (f"{kind}{m}" for m in range(M) for kind in "FB")


def backward_first(stage, P, M):
    """In each turn the backward comes before the forward."""
    ahead = min(P - 1 - stage, M)
    yield from (f"F{m}" for m in range(ahead))
    for m in range(M):
        yield f"B{m}"
        if m + ahead < M:
            yield f"F{m + ahead}"


def last_backward_first(stage, P, M):
    actions = in_words(stage, P, M)
    return actions[: -(P - stage)] + actions[-(P - stage) :][::-1] if stage == 0 else actions


def right_on_stage_0_alone(stage, P, M):
    return in_words(stage, P, M) if stage == 0 else map(str, gpipe(stage, P, M))


def without_end(stage, P, M):
    return map(str, itertools.cycle([Action("forward", 0), Action("backward", 0)]))


def one_backward_more(stage, P, M):
    return [*in_words(stage, P, M), f"B{M}"]


WRONG_STREAMS = [
    (gpipe, "stream.fill_and_drain"),
    (with_warm_up(lambda s, P: 0), "stream.all_last"),
    (with_warm_up(lambda s, P: P - 1), "stream.all_first"),
    (with_warm_up(lambda s, P: s), "stream.wrong_end", "stream.never_ends", "stream.so"),
    (
        with_warm_up(lambda s, P: P - s),
        "stream.too_long",
        "stream.so",
        "holds 5 micro-batches at once, but 4 would be enough",
    ),
    (
        with_warm_up(lambda s, P: max(P - 2 - s, 0)),
        "stream.too_short",
        "stream.so",
        "a step takes 54 s, but 33 s would be enough",
    ),
    (without_min, "stream.strange_forward"),
    (one_backward_more, "stream.strange"),
    (without_drain, "stream.no_drain"),
    (forwards_again, "stream.repeated"),
    (backward_first, "stream.backward_first"),
    (last_backward_first, "stream.orders"),
    (right_on_stage_0_alone, "stream.never_ends"),
    (without_end, "stream.repeated"),
    (lambda stage, P, M: [], "stream.missing"),
    (lambda stage, P, M: None, "stream.nothing"),
    (lambda stage, P, M: [3], "stream.no_action"),
    (lambda stage, P: [], "answer.raised"),
    (7, "fn.missing"),
]


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


def receive_first(comm, hop, outgoing, landing):
    if hop.recv:
        comm.recv(landing, hop.recv.peer)
    if hop.send:
        comm.send(outgoing, hop.send.peer)


def even_stages_send_first(comm, hop, outgoing, landing):
    (receive_first if comm.rank % 2 else send_first)(comm, hop, outgoing, landing)


def into_another(comm, hop, outgoing, landing):
    carry_out(comm, hop, outgoing, None if landing is None else torch.empty_like(landing))


def exchange_only(comm, hop, outgoing, landing):
    comm.exchange(outgoing, hop.send.peer, landing, hop.recv.peer)


def to_the_next_stage(comm, hop, outgoing, landing):
    if hop.send and hop.recv:
        comm.exchange(outgoing, comm.rank + 1, landing, comm.rank + 1)
    elif hop.send:
        comm.send(outgoing, comm.rank + 1)
    else:
        comm.recv(landing, comm.rank - 1)


def only_sends(comm, hop, outgoing, landing):
    if hop.send:
        comm.send(outgoing, hop.send.peer)


def own_tensor_back(comm, hop, outgoing, landing):
    carry_out(comm, hop, outgoing, landing)
    if hop.send and hop.recv:
        landing.copy_(outgoing)


WRONG_HOPS = [
    (send_first, "run.stuck"),
    (receive_first, "run.stuck"),
    (even_stages_send_first, "hop.calls"),
    (into_another, "hop.never_landed"),
    (exchange_only, "run.error"),
    (to_the_next_stage, "run.error"),
    (only_sends, "run.stuck"),
    (own_tensor_back, "hop.other_landed"),
    (lambda comm, hop: None, "fn.signature"),
]


ANSWERS = [
    Answers(check.pipeline.bubble, [idle_share, bubble], WRONG_BUBBLES),
    Answers(
        check.pipeline.one_f_one_b,
        [with_warm_up(lambda s, P: P - 1 - s), in_words],
        WRONG_STREAMS,
    ),
    Answers(check.pipeline.hop, [carry_out], WRONG_HOPS),
]
