"""Page 09: micro-batches, the streams of a stage, a hop, and the step.

Symbols: P stages and ranks, M micro-batches, n samples.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import schedules
from labkit.costs.pipeline_timeline import Slot, bubble as idle_share, predicted_slots
from labkit.engine.comm.comm import Comm
from labkit.schedules.pipeline import (
    Action,
    Hop,
    Message,
    in_flight,
    pipeline_streams,
    with_hops,
)
from labkit.workload.layers import EmulatedLayer
from workbook.exercises.grader import Case, Check, Target, Wrong, judged
from workbook.exercises.grader.compare import agree, beside, fit, plain, short
from workbook.exercises.grader.exercise import Found, Ranks, random_tensor, with_parameters
from workbook.exercises.grader.own_run import OwnRun

Streams = list[list[Action]]
KINDS = {"F": "forward", "B": "backward"}
# With backwards that are cut in two.
HALVES = {"F": "forward", "B": "backward_input", "W": "backward_weight"}

# (n, M, shape of a sample), most telling first.
_BATCHES = ((7, 3, (2,)), (8, 4, (2,)), (3, 5, (2,)), (6, 4, (1, 2, 2)), (6, 1, (2,)))
# (P, M) of the streams; the last two have fewer micro-batches than stages.
_SIZES = ((4, 8), (3, 5), (2, 4), (2, 1), (4, 2))


@judged("inputs, targets, count", *_BATCHES)
def micro_batches(fn: Callable, n: int, count: int, shape: tuple[int, ...]) -> Wrong | None:
    """Grade ``fn(inputs, targets, count)``: a batch cut into micro-batches, with weights.

    Returned are triples (inputs, targets, weight), as even as possible and at most one per
    sample.
    """
    # All targets of a batch differ, so that each sample can be told.
    inputs = random_tensor(count, n, *shape)
    targets = torch.randperm(n)
    returned = plain(fn(inputs.clone(), targets.clone(), count))
    try:
        parts = [(x, y, weight) for x, y, weight in returned]
        rows = []
        for _, y, _ in parts:
            rows.append([targets.tolist().index(int(target)) for target in y])
    except (TypeError, ValueError):
        return Wrong(f"{short(returned)}: expected triples (inputs, targets of the batch, weight)")
    sizes = [len(row) for row in rows]
    text = f"the micro-batches have {sizes} samples"
    if sizes and max(sizes) - min(sizes) > 1:
        return Wrong(f"{text}: more than one is between the largest and the smallest")
    if len(rows) != min(count, n) or max(sizes) - min(sizes) > 1 or 0 in sizes:
        return Wrong(f"{text}, expected {min(count, n)}, which differ by one at most")
    if sorted(itertools.chain(*rows)) != [*range(n)]:
        return Wrong(f"{text}; samples are lost, or there twice")
    for m, (row, (x, y, _)) in enumerate(zip(rows, parts)):
        if not agree(x, inputs[row]) or not agree(y, targets[row]):
            return Wrong(f"in micro-batch {m} inputs and targets do not belong together")
    weights = [weight for *_, weight in parts]
    expected = [size / n for size in sizes]
    if agree(weights, expected):
        return None
    cause = "the weight of a micro-batch is its share of the samples"
    return Wrong(f"{text}, but weights {beside(weights, expected)}\n{cause}")


def _timetable(
    fn: Callable, status: str, P: int, check: str = "one_f_one_b", kinds: dict[str, str] = KINDS
) -> Any:
    # Imported here: ranks load the checks, but draw nothing.
    from workbook.plots.pipeline import pipeline_timetable

    name = f"pipeline.{check}"
    try:
        streams = _streams(fn, P, 2 * P, kinds)
        if isinstance(streams, Wrong):
            raise ValueError(streams)
        slots = _slots(streams)
    except Exception:  # of the function; no answer, or stages that wait for each other
        return OwnRun.failed(name, status)
    return pipeline_timetable(slots, title=name, unit="forwards of a micro-batch")


def _slots(streams: Streams) -> list[Slot]:
    """A step's timetable, in which a backward takes twice as long as a forward."""
    return predicted_slots(streams, [1.0] * len(streams), [2.0] * len(streams))


@judged("stage, num_stages, num_micro_batches", *_SIZES, drawn=_timetable)
def one_f_one_b(fn: Callable, num_stages: int, num_micro_batches: int) -> Wrong | None:
    """Grade ``fn(stage, num_stages, num_micro_batches)``: the actions of a stage by 1F1B.

    The order of the micro-batches is free, if it is the same on every stage. No other order of
    forwards and backwards holds as few micro-batches and takes no longer.
    """
    streams = _streams(fn, num_stages, num_micro_batches)
    if isinstance(streams, Wrong):
        return streams
    fault = _wrong_streams(streams, num_micro_batches)
    return Wrong(fault) if fault else None


@judged(
    "stage, num_stages, num_micro_batches",
    *_SIZES,
    drawn=partial(_timetable, check="zero_bubble", kinds=HALVES),
)
def zero_bubble(fn: Callable, num_stages: int, num_micro_batches: int) -> Wrong | None:
    """Grade ``fn(stage, num_stages, num_micro_batches)``: a stage's stream with cut backwards.

    Any streams pass that end, hold no more activations than 1F1B does on stage 0, and take no
    longer than ``labkit.schedules.zero_bubble``, where F, B and W take equally long.
    """
    P, M = num_stages, num_micro_batches
    streams = _streams(fn, P, M, HALVES)
    if isinstance(streams, Wrong):
        return streams
    if fault := _incomplete(streams, M, HALVES):
        return Wrong(fault)
    try:
        end_s = max(slot.end_s for slot in _slots(streams))
    except ValueError as error:
        return Wrong(f"{error}: B needs its F, and the B of the stage behind, W its B")
    most = min(P, M)
    for stage, stream in enumerate(streams):
        held = in_flight(stream)
        if held > most:
            text = f"stage {stage} holds {held} micro-batches at once, from F to W; the most is"
            return Wrong(f"{text} {most}, what 1F1B holds on stage 0. It runs {_listed(stream)}")
    labkit_end_s = max(slot.end_s for slot in _slots(pipeline_streams("zero_bubble", P, M)))
    if end_s > labkit_end_s:
        text = f"the step takes {end_s:g} columns, the target is {labkit_end_s:g}, and 1F1B takes"
        return Wrong(f"{text} {3 * (M + P - 1)}{_why_slow(streams, M)}")
    return None


def _why_slow(streams: Streams, num_micro_batches: int) -> str:
    """The first stage with too few micro-batches under way, or idle while a W could run."""
    for stage, stream in enumerate(streams):
        held = in_flight(stream)
        least = min(len(streams) - stage, num_micro_batches)
        if held < least:
            text = f"; stage {stage} has at most {held} under way, where 1F1B has {least}"
            return f"{text}. It runs {_listed(stream)}"
    for stage, stream in enumerate(streams):
        slots = [slot for slot in _slots(streams) if slot.rank == stage]
        pending = set[int]()
        for action, slot, following in zip(stream, slots, slots[1:]):
            if action.kind == "backward_input":
                pending.add(action.micro_batch)
            elif action.kind == "backward_weight":
                pending.remove(action.micro_batch)
            gap = following.start_s - slot.end_s
            if gap >= 1 and pending:
                text = f"; after {action} stage {stage} is idle, though W{min(pending)} could run"
                return f"{text}. It runs {_listed(stream)}"
    pairs = [pair for stream in streams for pair in itertools.pairwise(map(str, stream))]
    if all(after == before.replace("B", "W") for before, after in pairs if before[0] == "B"):
        return "; each W follows its B at once, and the B of the stage before waits for it"
    last = len(streams) - 1
    return f"; no stage is idle while it could run a W. Stage {last} runs {_listed(streams[last])}"


def _streams(fn: Callable, P: int, M: int, kinds: dict[str, str] = KINDS) -> Streams | Wrong:
    """The streams of all stages; an action may also be a pair, or "F3"."""
    streams: Streams = []
    for stage in range(P):
        yielded = fn(stage, P, M)
        if not isinstance(yielded, Iterable):
            return Wrong(f"it returned {short(yielded)}: yield the actions, or return a list")
        stream: list[Action] = []
        # An endless generator must not hang the check.
        for action in itertools.islice(yielded, 4 * M + 4):
            if isinstance(action, str) and re.fullmatch(rf"[{''.join(kinds)}]\d+", action):
                action = (kinds[action[0]], action[1:])
            is_pair = isinstance(action, tuple | list) and len(action) in (2, 3)
            if not is_pair or action[0] not in kinds.values():
                uses = [f'Action("{kind}", 0) or "{letter}0"' for letter, kind in kinds.items()]
                return Wrong(f"{short(action)} is not an action here: use {', '.join(uses)}")
            stream.append(Action(action[0], int(action[1])))
        streams.append(stream)
    return streams


def _incomplete(streams: Streams, M: int, kinds: dict[str, str]) -> Found:
    """The first stage that does not run each action once."""
    expected = Counter(Action(kind, m) for kind in kinds.values() for m in range(M))
    for stage, stream in enumerate(streams):
        actions = Counter(stream)
        if actions != expected:
            names = " and ".join(f"{letter}0 to {letter}{M - 1}" for letter in kinds)
            text = f"missing: {_listed(expected - actions)}"
            text += f", too many: {_listed(actions - expected)}"
            return f"stage {stage} has to run each of {names} once; {text}"
    return None


def _wrong_streams(streams: Streams, M: int) -> Found:
    """The first stage whose stream is not complete, or not that of 1F1B."""
    if fault := _incomplete(streams, M, KINDS):
        return fault
    for kind in KINDS.values():
        orders = []
        for stream in streams:
            orders.append([action.micro_batch for action in stream if action.kind == kind])
        for stage, order in enumerate(orders):
            if order != orders[0]:
                text = f"stages 0 and {stage} run their {kind}s in different orders, {orders[0]} "
                return (
                    f"{text}and {order}, but messages arrive in the order in which they are sent"
                )
    for stage, stream in enumerate(streams):
        for position, action in enumerate(stream):
            forward = Action("forward", action.micro_batch)
            if action.kind == "backward" and forward not in stream[:position]:
                return f"stage {stage} runs {_listed(stream)}\n{action} needs {forward} before it"
        expected = list(schedules.one_f_one_b(stage, len(streams), M))
        if [action.kind for action in stream] != [action.kind for action in expected]:
            text = f"stage {stage} runs {_listed(stream)}\n"
            held = in_flight(stream)
            most = in_flight(expected)
            if held < most:
                return f"{text}with {held} micro-batches under way, not {most}, others wait for it"
            if held > most:
                return f"{text}it holds {held} micro-batches at once, where {most} are enough"
            kinds = zip(stream, expected, strict=True)
            first = next(n for n, (own, right) in enumerate(kinds) if own.kind != right.kind)
            text += f"after {_listed(stream[:first])} a {expected[first].kind} can run, and other"
            return f"{text} stages wait for it"
    return None


def _listed(actions: Iterable[Action]) -> str:
    return ", ".join(map(str, actions)) or "none"


# By stage the seconds of a forward; a backward takes twice that. The last three reveal mistakes
# that do not show in a textbook's timetable.
@judged(
    "slots",
    *(("gpipe", 4, (1.0, 1.0, 1.0), 0.0), ("one_f_one_b", 2, (1.0, 1.0, 1.0, 1.0), 0.0)),
    *(("gpipe", 3, (1.0,), 0.0), ("gpipe", 3, (1.0, 3.0, 2.0), 0.0)),
    ("gpipe", 2, (1.0, 1.0), 10.0),
)
def bubble(
    fn: Callable, schedule: str, M: int, forward_s: tuple[float, ...], start_s: float
) -> Wrong | None:
    """Grade ``fn(slots)``: the idle share, 0 to 1, of a timetable's stages.

    ``slots`` is a list of ``labkit.costs.pipeline_timeline.Slot``, in any order; the first one
    starts at second ``start_s``.
    """
    P = len(forward_s)
    order = {"gpipe": schedules.gpipe, "one_f_one_b": schedules.one_f_one_b}[schedule]
    streams = [list(order(stage, P, M)) for stage in range(P)]
    slots = []
    for slot in predicted_slots(streams, forward_s, [2 * seconds for seconds in forward_s]):
        slots.append(slot._replace(start_s=slot.start_s + start_s, end_s=slot.end_s + start_s))
    expected = idle_share(slots)
    if start_s:
        slots.reverse()
    share = fit(fn(slots), 0.0)
    if agree(share, expected):
        return None
    text = f"the function returned {beside(share, expected)}"
    step_s = max(slot.end_s for slot in slots) - start_s
    mistakes = {
        "the busy share": 1 - expected,
        "idle time over busy time": expected / (1 - expected),
        "the idle seconds, not a share": expected * P * step_s,
        "the idle share where the step begins at second 0": (
            1 - (1 - expected) * step_s / (start_s + step_s)
        ),
        "a formula for stages that are equally fast": (P - 1) / (M + P - 1),
    }
    for name, wrong in mistakes.items():
        if agree(share, wrong):
            return Wrong(f"{text}\nthat is {name}")
    return Wrong(text)


# M -> the schedule with which a stream is made.
_STREAMS = {5: schedules.one_f_one_b, 4: schedules.gpipe, 1: schedules.one_f_one_b}


def _stream(rank: int, P: int, M: int = 5) -> list[Action | Hop]:
    return [*with_hops(_STREAMS[M](rank, P, M), rank, P)]


def _hops(rank: int, P: int, M: int = 5) -> list[Hop]:
    return [step for step in _stream(rank, P, M) if isinstance(step, Hop)]


def _hops_and_a_ring(rank: int, P: int) -> list[Hop]:
    """The hops of a step, and one that sends to another rank than it receives from."""
    to_right, from_left = (Message("activation", 5, (rank + step) % P) for step in (1, -1))
    return [*_hops(rank, P), Hop(to_right, from_left)]


def _target(rank: int, case: Case) -> Target:
    """One message for each that the hops send, one call of comm per hop."""
    P, M = case.world_size, case.size
    hops = _hops(rank, P, M) if M else _hops_and_a_ring(rank, P)
    return Target(sum(hop.send is not None for hop in hops), operations=len(hops))


def _payload(message: Message, source: int, case: Case) -> Tensor:
    kind = message.kind == "gradient"
    return case.random(100 * source + 10 * kind + message.micro_batch, 64)


def _landed(rank: int, case: Case) -> dict[str, Tensor]:
    """The messages that a rank is to receive, in their order."""
    payloads = {}
    for hop in _hops_and_a_ring(rank, case.world_size):
        if message := hop.recv:
            name = f"the {message.kind} of micro-batch {message.micro_batch} from rank"
            payloads[f"{name} {message.peer}"] = _payload(message, message.peer, case)
    return payloads


def _completed(fn: Callable, comm: Comm, case: Case) -> list:
    """The tensors that the hops have received, and the most calls of comm in a hop."""
    received = []
    most = 0
    for hop in _hops_and_a_ring(comm.rank, comm.world_size):
        outgoing = _payload(hop.send, comm.rank, case) if hop.send else None
        landing = torch.zeros(64) if hop.recv else None
        before = comm.operations
        fn(comm, hop, outgoing, landing)
        most = max(most, comm.operations - before)
        if landing is not None:
            received.append(landing)
    return [*received, most]


def _one_call_each(case: Case, ranks: Ranks) -> Found:
    most = max(outcome.value[-1] for outcome in ranks)
    return f"a hop took {most} calls of comm, where the target is 1" if most > 1 else None


_check = partial(Check, inputs=lambda rank, case: (case,), written=None, target=_target)
# All hops of a 1F1B step are carried out, each in one call of comm.
hop = _check(
    "pipeline.hop",
    lambda rank, case: [*_landed(rank, case).values(), None],
    signature="comm, hop, outgoing, landing",
    call=_completed,
    rule=_one_call_each,
    parts=lambda case: {k: t for r in range(case.world_size) for k, t in _landed(r, case).items()},
    sizes=(),
)


def _micro_batches(case: Case) -> list[tuple[Tensor, Tensor, float]]:
    """M micro-batches of M + 2 samples: the first ones have a sample more than the others."""
    n = case.size + 2
    targets = torch.tensor([case.integer(key, 0, 2) for key in range(n)])
    cut = zip(case.random(n, n, 3).tensor_split(case.size), targets.tensor_split(case.size))
    return [(inputs, answers, len(answers) / n) for inputs, answers in cut]


def _layers(rank: int) -> nn.Sequential:
    return with_parameters(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), 31 + rank)


def _alone(
    rank: int, case: Case, weighs: bool = True, factor: Callable[[Case], float] = lambda case: 1
) -> list[Tensor | None]:
    """The gradients of one device."""
    layers = nn.Sequential(*map(_layers, range(case.world_size)))
    for inputs, targets, weight in _micro_batches(case):
        loss = functional.cross_entropy(layers(inputs), targets)
        (loss * (weight if weighs else factor(case))).backward()
    return [parameter.grad for parameter in layers[rank].parameters()]


def _step(fn: Callable, comm: Comm, case: Case) -> list[Tensor | None] | Wrong:
    # The emulated layer takes its time, so that the picture of a run is a timetable.
    layers = _layers(comm.rank).append(EmulatedLayer(0.001))
    stream = _stream(comm.rank, comm.world_size, case.size)
    ran = list[str]()
    layers[1].register_forward_pre_hook(lambda *_: ran.append("F"))
    layers[1].register_full_backward_hook(lambda *_: ran.append("B"))
    fn(comm, layers, stream, _micro_batches(case))
    expected = [str(action)[0] for action in stream if isinstance(action, Action)]
    if ran != expected:
        return Wrong(f"the layers ran {' '.join(ran)}, the stream says {' '.join(expected)}")
    return [parameter.grad for parameter in layers[0].parameters()]


# ``micro_batches`` are M triples (inputs [n, 3], targets [n], weight), the same on all ranks.
step = _check(
    "pipeline.step",
    _alone,
    signature="comm, layers, stream, micro_batches",
    call=_step,
    mistakes={
        "the loss of a micro-batch is not multiplied by its weight": partial(_alone, weighs=False),
        "the weight of a micro-batch is its share of the samples, not 1 / M": (
            partial(_alone, weighs=False, factor=lambda case: 1 / case.size)
        ),
    },
    sizes=tuple(_STREAMS),
    nouns=("stage", "micro-batch"),
    special=lambda case: f"by the streams of {_STREAMS[case.size].__name__}",
)
