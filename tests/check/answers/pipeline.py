"""Answers to ``check.pipeline``."""

import itertools
from collections import defaultdict, deque
from fractions import Fraction

import numpy as np
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


def idle_of_each_stage(slots):
    """Adds up the idle time itself, before, between and after the slots."""
    rows = defaultdict(list)
    for stage, _, _, start_s, end_s in slots:
        rows[stage].append((start_s, end_s))
    first, last = bounds(slots)
    idle = 0.0
    for row in rows.values():
        at = first
        for start_s, end_s in sorted(row):
            idle, at = idle + start_s - at, end_s
        idle += last - at
    return idle / (len(rows) * (last - first))


def idle_in_numpy(slots):
    stage, start_s, end_s = np.array([(s.stage, s.start_s, s.end_s) for s in slots]).T
    whole = len(np.unique(stage)) * (end_s.max() - start_s.min())
    return 1 - (end_s - start_s).sum() / whole


def idle_in_torch(slots):
    times = torch.tensor([(s.start_s, s.end_s) for s in slots], dtype=torch.float64)
    whole = stages_of(slots) * (times.max() - times.min())
    return (whole - times.diff().sum()) / whole


def idle_as_a_fraction(slots):
    start_s, end_s = map(Fraction, bounds(slots))
    return 1 - Fraction(busy(slots)) / (stages_of(slots) * (end_s - start_s))


def idle_by_mean(slots):
    """The mean over the stages of each one's idle share."""
    start_s, end_s = bounds(slots)
    stages = {slot.stage for slot in slots}
    shares = [1 - busy([s for s in slots if s.stage == k]) / (end_s - start_s) for k in stages]
    return [sum(shares) / len(shares)][0]


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


def as_pairs(stage, P, M):
    return tuple(
        (a.kind, a.micro_batch) for a in with_warm_up(lambda s, P: P - 1 - s)(stage, P, M)
    )


def by_a_queue(stage, P, M):
    """Runs a backward whenever as many micro-batches are held as may be."""
    held, actions = deque(), deque()
    forwards = iter(range(M))
    while len(actions) < 2 * M:
        m = next(forwards, None) if len(held) < P - stage else None
        if m is None:
            actions.append(f"B{held.popleft()}")
        else:
            held.append(m)
            actions.append(f"F{m}")
    return actions


def in_numpy_integers(stage, P, M):
    ahead = min(P - 1 - stage, M)
    numbers = np.arange(M)
    yield from (Action("forward", m) for m in numbers[:ahead])
    for m in numbers:
        if m + ahead < M:
            yield Action("forward", numbers[m + ahead])
        yield Action("backward", m)


def by_zipping(stage, num_stages, num_micro_batches):
    forwards = [Action("forward", m) for m in range(num_micro_batches)]
    backwards = [Action("backward", m) for m in range(num_micro_batches)]
    ahead = num_stages - 1 - stage
    pairs = itertools.zip_longest(forwards[ahead:], backwards)
    turns = itertools.chain.from_iterable(pairs)
    return filter(None, itertools.chain(forwards[:ahead], turns))


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


WRONG_STREAMS = [
    (of_four_stages, "stream.too_long"),
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


def by_cases(comm, hop, outgoing, landing):
    match hop.send, hop.recv:
        case (None, recv):
            comm.recv(landing, recv.peer)
        case (send, None):
            comm.send(outgoing, send.peer)
        case (send, recv):
            comm.exchange(send=outgoing, dst=send.peer, recv=landing, src=recv.peer)


def by_the_tensors(comm, hop, outgoing, landing):
    if outgoing is None:
        return comm.recv(landing, src=hop.recv.peer)
    if landing is None:
        return comm.send(outgoing, dst=hop.send.peer)
    return comm.exchange(outgoing, hop.send.peer, landing, hop.recv.peer)


def beside_and_copied(comm, hop, outgoing, landing):
    incoming = None if landing is None else torch.zeros_like(landing)
    carry_out(comm, hop, None if outgoing is None else outgoing.clone(), incoming)
    if incoming is not None:
        landing[:] = incoming


def by_a_table(comm, hop, outgoing, landing):
    {
        (True, True): lambda: comm.exchange(outgoing, hop.send[2], landing, hop.recv[2]),
        (True, False): lambda: comm.send(outgoing, hop.send[2]),
        (False, True): lambda: comm.recv(landing, hop.recv[2]),
    }[hop.send is not None, hop.recv is not None]()


def to_any_sender(comm, hop, outgoing, landing):
    """A single receive may also name the only sender that is possible."""
    if hop.send is None:
        comm.recv_any(landing, [hop.recv.peer])
    else:
        carry_out(comm, hop, outgoing, landing)


def through_numpy(comm, hop, outgoing, landing):
    carry_out(
        comm,
        hop,
        outgoing if outgoing is None else torch.from_numpy(outgoing.numpy().copy()),
        landing if landing is None else torch.from_numpy(landing.numpy()),
    )


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
    Answers(
        check.pipeline.bubble,
        [
            idle_share,
            idle_of_each_stage,
            idle_in_numpy,
            idle_in_torch,
            idle_as_a_fraction,
            idle_by_mean,
            bubble,
        ],
        [*WRONG_BUBBLES, (idle_of_the_first_stage, "bubble.differs")],
    ),
    Answers(
        check.pipeline.one_f_one_b,
        [
            with_warm_up(lambda s, P: P - 1 - s),
            in_words,
            as_pairs,
            by_a_queue,
            in_numpy_integers,
            by_zipping,
            by_recursion,
        ],
        WRONG_STREAMS,
    ),
    Answers(
        check.pipeline.hop,
        [
            carry_out,
            by_cases,
            by_the_tensors,
            beside_and_copied,
            by_a_table,
            to_any_sender,
            through_numpy,
        ],
        WRONG_HOPS,
    ),
]
