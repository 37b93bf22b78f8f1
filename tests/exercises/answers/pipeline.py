"""Answers to ``check.pipeline``: what needs no ranks, and the hop."""

import itertools
from collections import defaultdict, deque, namedtuple
from fractions import Fraction

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from labkit.costs.pipeline_timeline import bubble, bubble_formula
from labkit.schedules.pipeline import Action, gpipe, one_f_one_b
from workbook import check

travel_by_value(__name__)


# Micro-batches


def cut(inputs, targets, count):
    count = min(count, len(targets))
    parts = zip(inputs.tensor_split(count), targets.tensor_split(count))
    return [(x, y, len(y) / len(targets)) for x, y in parts]


def cut_by_bounds(inputs, targets, count):
    n = len(targets)
    count = min(count, n)
    for m in range(count):
        rows = slice(m * n // count, (m + 1) * n // count)
        yield inputs[rows], targets[rows], Fraction(rows.stop - rows.start, n)


def every_nth_sample(inputs, targets, count):
    """Cuts with a stride: the micro-batches need not be runs of samples."""
    n = len(targets)
    return tuple(
        (inputs[m::count], targets[m::count], len(targets[m::count]) / n)
        for m in range(min(count, n))
    )


def cut_in_numpy(inputs, targets, count):
    count = min(count, len(targets))
    both = np.array_split(inputs.numpy(), count), np.array_split(targets.numpy(), count)
    return [(x, y, np.float32(len(y) / len(targets))) for x, y in zip(*both)]


MicroBatch = namedtuple("MicroBatch", ["inputs", "targets", "weight"])


def cut_in_lists(inputs, targets, count):
    """Rows in lists, weights in tensors."""
    parts = cut(inputs, targets, count)
    return [MicroBatch(list(x), y.tolist(), torch.tensor(w)) for x, y, w in reversed(parts)]


def cut_by_recursion(inputs, targets, count, n=None):
    n, count = n or len(targets), min(count, len(targets))
    if count == 0:
        return []
    size = len(targets) // count
    first = {"inputs": inputs[:size], "targets": targets[:size], "weight": size / n}
    return [first, *cut_by_recursion(inputs[size:], targets[size:], count - 1, n)]


def cut_by_keyword(*, targets, count, inputs):
    sizes = [len(rows) for rows in torch.arange(len(targets)).tensor_split(count)]
    sizes = [size for size in sizes if size]
    weights = torch.tensor(sizes) / len(targets)
    return zip(inputs.split(sizes), targets.split(sizes), weights)


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


def drops_the_rest(inputs, targets, count):
    size = max(len(targets) // count, 1)
    starts = range(0, min(count, len(targets)) * size, size)
    return [(inputs[a : a + size], targets[a : a + size], size / len(targets)) for a in starts]


def first_sample_everywhere(inputs, targets, count):
    parts = cut(inputs, targets, count)
    first = inputs[:1], targets[:1]
    return [
        parts[0],
        *((torch.cat([first[0], x]), torch.cat([first[1], y]), w) for x, y, w in parts[1:]),
    ]


def steps_of_a_size(inputs, targets, count):
    size = max(len(targets) // count, 1)
    parts = zip(inputs.split(size), targets.split(size))
    return [(x, y, len(y) / len(targets)) for x, y in parts]


def other_targets(inputs, targets, count):
    return [(x, y.flip(0), w) for x, y, w in cut(inputs, targets, count)]


def sample_by_sample(inputs, targets, count):
    parts = cut(inputs, targets, count)
    return [(x[0] if len(x) == 1 else x, y, w) for x, y, w in parts]


WRONG_CUTS = [
    (weighted(lambda size, n, M: 1), "micro_batches.ones"),
    (weighted(lambda size, n, M: 1 / M), "micro_batches.mean_of_means"),
    (weighted(lambda size, n, M: size), "micro_batches.sizes"),
    (weighted(lambda size, n, M: 1 / n), "micro_batches.of_sums"),
    (weighted(lambda size, n, M: n / size), "micro_batches.inverse"),
    (weighted(lambda size, n, M: size / n / M), "micro_batches.weights"),
    (weighted(lambda size, n, M: size / n, torch.chunk), "micro_batches.uneven"),
    (steps_of_a_size, "micro_batches.count", "there are 4 micro-batches"),
    (empty_ones, "micro_batches.empty", "3 samples, count 5: "),
    (drops_the_rest, "micro_batches.lost", "1 sample of the batch"),
    (first_sample_everywhere, "micro_batches.twice"),
    (other_targets, "micro_batches.pairs"),
    (sample_by_sample, "micro_batches.shapes"),
    (lambda inputs, targets, count: inputs.tensor_split(count), "micro_batches.no_triple"),
    (lambda inputs, targets, count: count, "micro_batches.no_triple"),
    (lambda inputs, targets, count: None, "answer.nothing"),
]


# GPipe's stream


def fill_and_drain(stage, P, M):
    for m in range(M):
        yield Action("forward", m)
    for m in range(M):
        yield Action("backward", m)


def fill_and_drain_in_words(stage, num_stages, num_micro_batches):
    numbers = range(num_micro_batches)
    return [f"F{m}" for m in numbers] + [f"B{m}" for m in numbers]


def drain_backwards(stage, P, M):
    """The order of the paper's figure: the last micro-batch comes back first."""
    return [("forward", m) for m in range(M)] + [("backward", m) for m in reversed(range(M))]


def by_a_product(stage, P, M):
    return map("".join, itertools.product("FB", map(str, range(M))))


def by_division(stage, P, M):
    return tuple(Action(("forward", "backward")[k // M], k % M) for k in range(2 * M))


def gpipe_by_recursion(stage, P, M, kind="forward", m=0):
    if m == M:
        return [] if kind == "backward" else gpipe_by_recursion(stage, P, M, "backward")
    return [[kind, np.int64(m)], *gpipe_by_recursion(stage, P, M, kind, m + 1)]


def keyword_only(*, stage, num_stages, num_micro_batches):
    return iter(fill_and_drain(stage, num_stages, num_micro_batches))


def one_at_a_time(stage, P, M):
    """Each micro-batch comes back before the next begins: one stage works at a time."""
    return [f"{kind}{m}" for m in range(M) for kind in "FB"]


def last_stage_turns_back(stage, P, M):
    first, last = range(M), range(M)
    return [f"F{m}" for m in first] + [f"B{m}" for m in (last if stage else reversed(last))]


WRONG_GPIPES = [
    (one_at_a_time, "stream.too_early", "runs B0 before F1"),
    (one_f_one_b, "stream.too_early"),
    (last_stage_turns_back, "stream.orders"),
    (lambda stage, P, M: [f"F{m}" for m in range(M)], "stream.no_drain"),
    (lambda stage, P, M: [f"F{m}" for m in range(1, M + 1)], "stream.strange_forward"),
    (lambda stage, P, M: ["."] * stage + [f"F{m}" for m in range(M)], "stream.no_action"),
    (lambda stage, P, M: None, "stream.nothing"),
]


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
        check.pipeline.micro_batches,
        [
            cut,
            cut_by_bounds,
            every_nth_sample,
            cut_in_numpy,
            cut_in_lists,
            cut_by_recursion,
            cut_by_keyword,
        ],
        WRONG_CUTS,
    ),
    Answers(
        check.pipeline.gpipe,
        [
            fill_and_drain,
            fill_and_drain_in_words,
            drain_backwards,
            by_a_product,
            by_division,
            gpipe_by_recursion,
            keyword_only,
            gpipe,
        ],
        WRONG_GPIPES,
    ),
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
