"""Page 09: micro-batches, the streams of a stage, a hop, and the step.

Symbols: P stages and ranks, M micro-batches, n samples.
"""

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import schedules
from labkit.comm.comm import Comm
from labkit.costs.pipeline_timeline import Slot, bubble as idle_share, predicted_slots
from labkit.schedules.pipeline import Action, Hop, Message, in_flight, with_hops
from labkit.units import format_count
from labkit.workload.layers import EmulatedLayer
from workbook.exercises.grader import WORLD_SIZES, Case, Target, Verdict, Wrong, ask, returns
from workbook.exercises.grader.compare import agree, fit, plain, short
from workbook.exercises.grader.exercise import Found, random_tensor, with_parameters
from workbook.exercises.grader.in_process import Question, differs
from workbook.exercises.grader.own_run import OwnRun

Streams = list[list[Action]]
Schedule = Callable[[int, int, int], Iterable[Action]]
KINDS = {"F": "forward", "B": "backward"}

# (n, M, shape of a sample), most telling first.
_BATCHES = ((7, 3, (2,)), (8, 4, (2,)), (3, 5, (2,)), (6, 4, (1, 2, 2)), (6, 1, (2,)))
# (P, M) of the streams; the last two have fewer micro-batches than stages.
_SIZES = ((4, 8), (3, 5), (2, 4), (2, 1), (4, 2))


def micro_batches(fn: Callable) -> Verdict:
    """Grade ``fn(inputs, targets, count)``: a batch cut into micro-batches, with weights.

    Returned are triples (inputs, targets, weight), as even as possible and at most one per
    sample. Runs without ranks.
    """

    def call(fn: Callable, *batch: Any) -> Any:
        found = fn(*batch)
        if not isinstance(found, Iterable):
            return Wrong(f"the function returned {short(found)}: expected triples")
        found = [one.values() if isinstance(one, dict) else one for one in plain(iter(found))]
        for one in found:
            if not isinstance(one, Iterable) or len([*one]) != 3:
                return Wrong(f"{short(one)} is no triple (inputs, targets, weight)")
        return [[*one] for one in found]

    def wrong(question: Question, found: list[list]) -> Found:
        inputs, targets, count = question.args
        try:
            # All targets of a batch differ, so that each sample can be told.
            rows = [[targets.tolist().index(int(one)) for one in y] for _, y, _ in found]
        except (TypeError, ValueError):
            return f"{question.words}: there are targets that are not those of the batch"
        sizes, n = [len(row) for row in rows], len(targets)
        text = f"{question.words}: the micro-batches have {sizes} samples"
        if len(rows) != min(count, n) or max(sizes) - min(sizes) > 1 or 0 in sizes:
            return f"{text}, expected {min(count, n)}, which differ by one at most"
        if sorted(itertools.chain(*rows)) != [*range(n)]:
            return f"{text}; samples are lost, or there twice"
        for m, (of, (x, y, _)) in enumerate(zip(rows, found)):
            if not agree(x, inputs[of]) or not agree(y, targets[of]):
                return f"{text}; in micro-batch {m} inputs and targets do not belong together"
        weights, expected = [weight for *_, weight in found], [size / n for size in sizes]
        if agree(weights, expected):
            return None
        return f"{text}, but weights {short(weights)}, expected {short(expected)}"

    questions = []
    for key, (n, count, shape) in enumerate(_BATCHES):
        targets = torch.randperm(n, generator=torch.Generator().manual_seed(key))
        words = f"{format_count(n, 'sample')}, count {count}"
        questions.append(Question((random_tensor(key, n, *shape), targets, count), words))
    signature = "inputs, targets, count"
    return ask("pipeline.micro_batches", fn, questions, wrong, call=call, signature=signature)


def gpipe(fn: Callable) -> Verdict:
    """Grade ``fn(stage, num_stages, num_micro_batches)``: the actions of a stage by GPipe.

    The order of the micro-batches is free, if it is the same on every stage. Runs without ranks.
    """
    return _stream("pipeline.gpipe", fn, schedules.gpipe)


def one_f_one_b(fn: Callable) -> Verdict:
    """Grade ``fn(stage, num_stages, num_micro_batches)``: the actions of a stage by 1F1B.

    No other order of forwards and backwards holds as few micro-batches and takes no longer. Runs
    without ranks.
    """
    return _stream("pipeline.one_f_one_b", fn, schedules.one_f_one_b)


def _stream(name: str, fn: Callable, schedule: Schedule) -> Verdict:
    """Grade the streams of all stages, for several sizes; the verdict's own run draws them."""
    seen: dict[int, Streams] = {}

    def call(fn: Callable, P: int, M: int) -> Streams | Wrong:
        streams: Streams = []
        for stage in range(P):
            yielded = fn(stage, P, M)
            if not isinstance(yielded, Iterable):
                return Wrong(f"it returned {short(yielded)}: yield the actions, or return a list")
            # An endless generator must not hang the check.
            things = [*itertools.islice(yielded, 4 * M + 4)]
            streams.append([action for thing in things if (action := _action(thing))])
            if strange := [thing for thing in things if not _action(thing)]:
                return Wrong(
                    f'{short(strange[0])} is no action: use Action("forward", 0), or "F0"'
                )
        return streams

    def wrong(question: Question, streams: Streams) -> Found:
        P, M = question.args
        seen.setdefault(P, streams)
        found = _wrong_streams(streams, M, schedule)
        return f"{question.words}, {found}" if found else None

    def drawn(status: str, P: int) -> Any:
        if P not in seen:
            return OwnRun.failed(name, status)
        # Imported here: ranks load the checks, but draw nothing.
        from workbook.plots.pipeline import pipeline_timetable

        try:
            slots = _timetable(seen[P])
        except ValueError as error:
            return OwnRun(name, f"{error}, so there is nothing to draw.")
        return pipeline_timetable(slots, title=name, unit="forwards of a micro-batch")

    questions = [
        Question((P, M), f"with {format_count(P, 'stage')} and {format_count(M, 'micro-batch')}")
        for P, M in _SIZES
    ]
    signature = "stage, num_stages, num_micro_batches"
    verdict = ask(name, fn, questions, wrong, call=call, signature=signature)
    verdict.run_again = drawn
    return verdict


def _action(thing: Any) -> Action | None:
    """What ``fn`` yields as an Action: it may also be a pair, or "F3"; None if it is none."""
    if isinstance(thing, str) and re.fullmatch(r"[FB]\d+", thing):
        return Action(KINDS[thing[0]], int(thing[1:]))
    if isinstance(thing, tuple | list) and len(thing) == 2 and thing[0] in KINDS.values():
        return Action(thing[0], int(thing[1]))
    return None


def _wrong_streams(streams: Streams, M: int, schedule: Schedule) -> Found:
    """The first stage whose stream is not complete, or no stream of this schedule."""
    wanted = Counter(Action(kind, m) for kind in KINDS.values() for m in range(M))
    for stage, stream in enumerate(streams):
        if Counter(stream) != wanted:
            text = f"stage {stage} has to run each of F0 to F{M - 1} and B0 to B{M - 1} once; "
            missing, more = wanted - Counter(stream), Counter(stream) - wanted
            return f"{text}missing: {_listed(missing)}, too many: {_listed(more)}"
        for i, (kind, m) in enumerate(stream):
            if kind == "backward" and Action("forward", m) not in stream[:i]:
                return f"stage {stage} runs B{m} before F{m}"
    for kind in KINDS.values():
        first, *others = [[a.micro_batch for a in row if a.kind == kind] for row in streams]
        for stage, order in enumerate(others, start=1):
            if order != first:
                text = f"stages 0 and {stage} run their {kind}s in different orders, {first} and "
                return f"{text}{order}, but messages arrive in the order in which they are sent"
    ours = _of_labkit(schedule, len(streams), M)
    for stage, both in enumerate(zip(streams, ours)):
        alike = [one.kind == other.kind for one, other in zip(*both)]
        if not all(alike):
            begin, our_begin = [_listed(row[: alike.index(False) + 1]) for row in both]
            held, our_held = map(in_flight, both)
            text = f"stage {stage} runs {begin} ..., labkit's {our_begin} ...; it holds {held} "
            text += f"micro-batches at once, labkit's {our_held}"
            try:
                steps_s = [max(s.end_s for s in _timetable(rows)) for rows in (streams, ours)]
            except ValueError as error:
                return f"{text}; {error}"
            text += "; a step takes {:g} s, with labkit's {:g} s".format(*steps_s)
            return f"{text} (a forward takes 1 s, a backward 2 s)"
    return None


def _listed(actions: Iterable[Action]) -> str:
    return ", ".join(map(str, actions)) or "none"


def _of_labkit(schedule: Schedule, P: int, M: int) -> Streams:
    return [[*schedule(stage, P, M)] for stage in range(P)]


def _timetable(streams: Streams, forward_s: Sequence[float] = ()) -> list[Slot]:
    """The streams on paper, a backward as long as two forwards, on equal stages by default."""
    forward_s = forward_s or [1.0] * len(streams)
    return predicted_slots(streams, forward_s, [2 * seconds for seconds in forward_s])


def bubble(fn: Callable) -> Verdict:
    """Grade ``fn(slots)``: the idle share, 0 to 1, of a timetable's stages. Runs without ranks.

    ``slots`` is a list of ``labkit.costs.pipeline_timeline.Slot``, in any order; the first one may
    start at any second.
    """

    def by_formula(slots: Sequence[Slot]) -> float:
        waiting = len({slot.stage for slot in slots}) - 1
        return waiting / (len({slot.micro_batch for slot in slots}) + waiting)

    gpipe = partial(_of_labkit, schedules.gpipe)
    late = [
        slot._replace(start_s=slot.start_s + 10, end_s=slot.end_s + 10)
        for slot in _timetable(gpipe(2, 2))
    ]
    # The last three reveal mistakes that do not show in a textbook's timetable.
    tables = {
        "GPipe, 3 stages, 4 micro-batches": _timetable(gpipe(3, 4)),
        "1F1B, 4 stages, 2 micro-batches": _timetable(_of_labkit(schedules.one_f_one_b, 4, 2)),
        "a single stage, 3 micro-batches": _timetable(gpipe(1, 3)),
        "GPipe, stages of 1, 3 and 2 s": _timetable(gpipe(3, 3), (1.0, 3.0, 2.0)),
        "GPipe, 2 stages, from second 10 on": late[::-1],
    }
    return ask(
        "pipeline.bubble",
        fn,
        [
            Question((slots,), f"bubble({words})", idle_share(slots))
            for words, slots in tables.items()
        ],
        differs,
        mistakes={"the formula holds for equal stages only: count in the timetable": by_formula},
        call=lambda fn, slots: fit(fn(slots), 0.0),
    )


def _target(steps: Iterable[Action | Hop]) -> Target:
    """One message for each that the hops send, one call of comm per hop."""
    hops = [one for one in steps if isinstance(one, Hop)]
    return Target(sum(one.send is not None for one in hops), operations=len(hops))


def hop(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, hop, outgoing, landing)``: carry out one ``schedules.Hop``.

    All hops of a 1F1B step are carried out. Target: one call of comm per hop.
    """

    def hops(rank: int, P: int) -> list[Hop]:
        steps = with_hops(schedules.one_f_one_b(rank, P, 5), rank, P)
        return [step for step in steps if isinstance(step, Hop)]

    def payload(message: Message, source: int, case: Case) -> Tensor:
        kind = message.kind == "gradient"
        return case.random(100 * source + 10 * kind + message.micro_batch, 64)

    def landed(rank: int, case: Case) -> dict[str, Tensor]:
        """What a rank is to receive, in its order."""
        came = [one.recv for one in hops(rank, case.world_size) if one.recv]
        names = (f"the {m.kind} of micro-batch {m.micro_batch} from rank {m.peer}" for m in came)
        return dict(zip(names, (payload(message, message.peer, case) for message in came)))

    def call(fn: Callable, comm: Comm, case: Case) -> list[Tensor] | Wrong:
        found, own, before = [], hops(comm.rank, comm.world_size), comm.operations
        for one in own:
            outgoing = payload(one.send, comm.rank, case) if one.send else None
            landing = torch.zeros(64) if one.recv else None
            fn(comm, one, outgoing, landing)
            found += [] if landing is None else [landing]
        if (calls := comm.operations - before) != len(own):
            text = f"{calls} calls of comm for {len(own)} hops: a hop that sends and receives is "
            return Wrong(f"{text}one comm.exchange")
        return found

    return returns(
        fn,
        lambda rank, case: [*landed(rank, case).values()],
        name="pipeline.hop",
        signature="comm, hop, outgoing, landing",
        inputs=lambda rank, case: (case,),
        call=call,
        parts=lambda case: {
            k: v for r in range(case.world_size) for k, v in landed(r, case).items()
        },
        target=lambda rank, case: _target(hops(rank, case.world_size)),
        world_sizes=world_sizes,
    )


# M -> how such a stream is made.
_STREAMS = {5: schedules.one_f_one_b, 4: schedules.gpipe, 1: schedules.one_f_one_b}


def _stream_of(rank: int, case: Case) -> list[Action | Hop]:
    P = case.world_size
    return [*with_hops(_STREAMS[case.size](rank, P, case.size), rank, P)]


def _micro_batches(case: Case) -> list[tuple[Tensor, Tensor, float]]:
    """M micro-batches of M + 2 samples: the first ones have a sample more than the others."""
    n = case.size + 2
    targets = torch.tensor([case.integer(key, 0, 2) for key in range(n)])
    cut = zip(case.random(n, n, 3).tensor_split(case.size), targets.tensor_split(case.size))
    return [(inputs, answers, len(answers) / n) for inputs, answers in cut]


def _layers(rank: int) -> nn.Sequential:
    return with_parameters(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), 31 + rank)


def step(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, layers, stream, micro_batches)``: one stage's part of a training step.

    ``micro_batches`` are M triples (inputs [n, 3], targets [n], weight), the same on all ranks. At
    the end the parameters of ``layers`` have the gradients of one device. Target: one message for
    each that the stream sends, one call of comm per hop.
    """

    def alone(rank: int, case: Case, weighs: bool = True) -> list[Tensor | None]:
        """The gradients of one device."""
        layers = nn.Sequential(*map(_layers, range(case.world_size)))
        for inputs, targets, weight in _micro_batches(case):
            loss = functional.cross_entropy(layers(inputs), targets)
            (weight * loss if weighs else loss).backward()
        return [parameter.grad for parameter in layers[rank].parameters()]

    def call(fn: Callable, comm: Comm, case: Case) -> list[Tensor | None] | Wrong:
        """On the rank: the gradients that ``fn`` leaves, if it has run the stream."""
        layers, stream, ran = _layers(comm.rank), _stream_of(comm.rank, case), list[str]()
        # Takes its time, so that the picture of a run is a timetable.
        layers.insert(1, EmulatedLayer(0.001))
        layers[0].register_forward_pre_hook(lambda *_: ran.append("F"))

        def note_backward(layer: nn.Module, given: Any, output: Tensor) -> None:
            if output.requires_grad:
                output.register_hook(lambda _: ran.append("B"))

        layers[-1].register_forward_hook(note_backward)
        fn(comm, layers, stream, _micro_batches(case))
        expected = [str(one)[0] for one in stream if isinstance(one, Action)]
        if ran != expected:
            text = f"the layers ran in the order {' '.join(ran) or 'nothing'} (F: forward, B: "
            return Wrong(f"{text}backward), the stream says {' '.join(expected)}")
        return [parameter.grad for parameter in layers[0].parameters()]

    return returns(
        fn,
        alone,
        name="pipeline.step",
        inputs=lambda rank, case: (case,),
        signature="comm, layers, stream, micro_batches",
        call=call,
        target=lambda rank, case: _target(_stream_of(rank, case)),
        mistakes={
            "the loss of a micro-batch is not multiplied by its weight": partial(
                alone, weighs=False
            ),
        },
        sizes=tuple(_STREAMS),
        nouns=("stage", "micro-batch"),
        special=lambda case: f"by the streams of {_STREAMS[case.size].__name__}",
        may_call=frozenset({"carry_out"}),
        world_sizes=world_sizes,
    )
