"""Answers to ``check.pipeline``: what needs no ranks, and the hop."""

import torch
from graded import Answers, ends

from labkit import schedules
from labkit.costs.pipeline_timeline import bubble, bubble_formula
from labkit.schedules.pipeline import Action
from labkit.strategies.hops import run_hop
from workbook import check

# Micro-batches


def cut(inputs, targets, count, weight=None):
    parts = zip(inputs.tensor_split(count), targets.tensor_split(count))
    return [(x, y, weight or len(y) / len(targets)) for x, y in parts]


def at_most_one_per_sample(inputs, targets, count):
    return cut(inputs, targets, min(count, len(targets)))


def all_weigh_one(inputs, targets, count):
    return cut(inputs, targets, min(count, len(targets)), 1.0)


# The bubble of a timetable


def idle_of_the_first_stage(slots):
    return bubble([slot for slot in slots if slot.rank == 0])


def by_the_formula(slots):
    """The formula holds for equal stages only."""
    stages, micro_batches = ({getattr(s, of) for s in slots} for of in ("rank", "micro_batch"))
    return bubble_formula(len(stages), len(micro_batches))


# The 1F1B stream


def by_recursion(stage, P, M, done=(0, 0)):
    f, b = done
    if b == M:
        return []
    if f < M and f - b < P - stage:
        return [f"F{f}", *by_recursion(stage, P, M, (f + 1, b))]
    return [f"B{b}", *by_recursion(stage, P, M, (f, b + 1))]


def as_actions(stage, P, M):
    kinds = {"F": "forward", "B": "backward"}
    return [Action(kinds[one[0]], int(one[1:])) for one in by_recursion(stage, P, M)]


def warms_up_for_four_stages(stage, P, M):
    warm_up = min(3 - stage, M)
    yield from (Action("forward", m) for m in range(warm_up))
    for m in range(M):
        if m + warm_up < M:
            yield Action("forward", m + warm_up)
        yield Action("backward", m)


def last_backward_first(stage, num_stages, num_micro_batches):
    """Before its forward."""
    for kind, m, *_ in schedules.one_f_one_b(stage, num_stages, num_micro_batches):
        yield kind, m if kind == "forward" else num_micro_batches - 1 - m


def one_at_a_time(stage, num_stages, num_micro_batches):
    for m in range(num_micro_batches):
        yield from (f"F{m}", f"B{m}", f"W{m}")


def forwards_again(stage, P, M):
    ahead = P - 1 - stage
    yield from (f"F{m}" for m in range(ahead))
    yield from (f"{kind}{m}" for m in range(M) for kind in "FB")


# The zero-bubble stream


def cut_in_two(stage, P, M, lag=None):
    """1F1B whose weights wait for ``lag`` micro-batches, by default as many as stages before."""
    ahead, lag = min(P - 1 - stage, M), min(stage if lag is None else lag, M)
    yield from (Action("forward", m) for m in range(ahead))
    for m in range(M):
        if m + ahead < M:
            yield Action("forward", m + ahead)
        yield Action("backward_input", m)
        if m >= lag:
            yield Action("backward_weight", m - lag)
    yield from (("backward_weight", m) for m in range(M - lag, M))


def by_counting(stage, P, M):
    """As a weight is due, then as a forward may run ahead, then what is left."""
    f = b = w = 0
    while w < M:
        if w < b - stage or b == M:
            w, name = w + 1, f"W{w}"
        elif f < M and f - b < P - stage:
            f, name = f + 1, f"F{f}"
        else:
            b, name = b + 1, f"B{b}"
        yield name


def weights_at_once(stage, P, M):
    yield from cut_in_two(stage, P, M, lag=0)


def weights_at_the_end(stage, P, M):
    yield from cut_in_two(stage, P, M, lag=M)


def weights_after_the_drain(stage, P, M):
    """The gaps between the last B's stay empty."""
    stream = list(cut_in_two(stage, P, M))
    last = max(place for place, action in enumerate(stream) if action[0] == "forward")
    late = [action for action in stream[last:] if action[0] == "backward_weight"]
    yield from (action for action in stream if action not in late)
    yield from late


# The hop


def through_numpy(comm, hop, outgoing, landing):
    copied = None if outgoing is None else torch.from_numpy(outgoing.numpy().copy())
    if hop.send and hop.recv:
        comm.exchange(copied, hop.send.peer, landing, hop.recv.peer)
    elif hop.send:
        comm.send(copied, hop.send.peer)
    else:
        comm.recv(landing, hop.recv.peer)


def send_first(comm, hop, outgoing, landing):
    if hop.send:
        comm.send(outgoing, hop.send.peer)
    if hop.recv:
        comm.recv(landing, hop.recv.peer)


def exchange_only(comm, hop, outgoing, landing):
    comm.exchange(outgoing, hop.send.peer, landing, hop.recv.peer)


def with_the_peers_swapped(comm, hop, outgoing, landing):
    if hop.send and hop.recv:
        hop = hop._replace(
            send=hop.send._replace(peer=hop.recv.peer), recv=hop.recv._replace(peer=hop.send.peer)
        )
    run_hop(comm, hop, outgoing, landing)


ANSWERS = [
    Answers(
        check.pipeline.micro_batches,
        [at_most_one_per_sample],
        [all_weigh_one, cut],
    ),
    Answers(
        check.pipeline.bubble,
        [bubble],
        [idle_of_the_first_stage, by_the_formula],
    ),
    Answers(
        check.pipeline.one_f_one_b,
        [by_recursion, as_actions],
        [warms_up_for_four_stages, forwards_again, last_backward_first, 7],
    ),
    Answers(
        check.pipeline.zero_bubble,
        [cut_in_two, by_counting],
        [
            weights_at_once,
            weights_at_the_end,
            weights_after_the_drain,
            forwards_again,
            one_at_a_time,
        ],
    ),
    Answers(
        check.pipeline.hop,
        [run_hop, through_numpy],
        [
            ends(send_first),
            ends(exchange_only),
            with_the_peers_swapped,
        ],
    ),
]
