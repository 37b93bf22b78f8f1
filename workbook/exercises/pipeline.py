"""The checks of page 09: micro-batches, the streams of a stage, a hop, and the step.

``check.micro_batches`` and ``check.pipeline_streams`` judge what needs no ranks. Symbols: P stages
and ranks, M micro-batches, n samples, s a stage.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import schedules
from labkit.comm.comm import Comm
from labkit.costs.pipeline_timeline import Slot, bubble as idle_share, predicted_slots
from labkit.schedules.pipeline import Action, Hop, Message, with_hops
from labkit.strategies.stage import StagedModel
from labkit.workload.emulated_layer import EmulatedLayer
from workbook.exercises.grader import (
    WORLD_SIZES,
    Case,
    Exercise,
    Mistake,
    Target,
    Verdict,
    grade,
    returns,
)
from workbook.exercises.grader.compare import agree, fit, other_kind
from workbook.exercises.grader.exercise import with_parameters
from workbook.exercises.grader.in_process import Question, Wrong, ask
from workbook.exercises.grader.own_run import own_run
from workbook.exercises.grader.report import announces_a_stop, told
from workbook.exercises.micro_batches import (
    BATCH_NAMES,
    parts_of,
    questions,
    said_when_right,
    wrong_parts,
)
from workbook.exercises.pipeline_streams import (
    BACKWARD_S,
    STREAM_NAMES,
    judged_on_paper,
    stream_of,
    with_timetable,
    wrong_gpipe,
    wrong_one_f_one_b,
)

_WIDTH, _MICRO_BATCHES = 3, 5
# Of a sample's forward in a stage of the step that is drawn.
_DRAWN_S = 0.004


def micro_batches(fn: Callable) -> Verdict:
    """Grade ``fn(inputs, targets, count)``: a batch cut into micro-batches, with weights.

    Returned are triples (inputs, targets, weight), as even as possible and at most one per
    sample. The weighted sum of their mean losses has to be the mean loss of the batch. Runs
    without ranks.
    """
    judge = partial(
        ask,
        "pipeline.micro_batches",
        fn,
        questions(),
        wrong_parts,
        call=parts_of,
        right=said_when_right,
        signature=BATCH_NAMES,
    )
    return told("pipeline.micro_batches", judge)


def gpipe(fn: Callable) -> Verdict:
    """Grade ``fn(stage, num_stages, num_micro_batches)``: the actions of a stage by GPipe.

    All forwards come first, then all backwards, in an order that is the same on every stage. Runs
    without ranks.
    """
    name = "pipeline.gpipe"
    judge = partial(judged_on_paper, name, fn, wrong_gpipe)
    return with_timetable(told(name, judge), fn, schedules.gpipe)


def bubble(fn: Callable) -> Verdict:
    """Grade ``fn(slots)``: the idle share, 0 to 1, of a timetable's stages. Runs in this process.

    ``slots`` is a list of ``labkit.costs.pipeline_timeline.Slot``, in any order; the first one may
    start at any second.
    """
    name = "pipeline.bubble"
    tables = [Question((slots,), case, idle_share(slots)) for case, slots in _tables().items()]
    mistakes = _BUBBLE_MISTAKES.items()
    judge = partial(ask, name, fn, tables, _wrong_bubble, mistakes=mistakes, call=_share_of)
    return told(name, judge)


def one_f_one_b(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(stage, num_stages, num_micro_batches)``: the actions of a stage by 1F1B.

    The streams are first judged on paper: they have to contain each action once, in an order that
    can finish, hold no more micro-batches and take no longer than 1F1B. If they are, each rank
    trains its stage by its stream, and has to get the gradients of one device.
    """
    name = "pipeline.one_f_one_b"
    with announces_a_stop(name):
        on_paper = judged_on_paper(name, fn, wrong_one_f_one_b)
    if not on_paper:
        verdict = told(name, lambda: on_paper)
    else:
        verdict = returns(
            fn,
            _gradients_alone,
            name=name,
            signature=STREAM_NAMES,
            call=_train_by,
            world_sizes=world_sizes,
        )
    return with_timetable(verdict, fn, schedules.one_f_one_b)


def hop(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, hop, outgoing, landing)``: carry out one ``schedules.Hop``.

    ``outgoing`` is the tensor to send and ``landing`` the tensor to receive into; None if the hop
    does not send, or does not receive. All hops of a 1F1B step are carried out. Target: one
    call of comm per hop.
    """
    return returns(
        fn,
        name="pipeline.hop",
        signature="comm, hop, outgoing, landing",
        call=_play,
        judge=_judge_hops,
        target=_messages_of_hops,
        world_sizes=world_sizes,
    )


def step(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, layers, stream, micro_batches)``: one stage's part of a training step.

    ``stream`` holds the stage's Actions and Hops, by 1F1B or by GPipe; ``micro_batches`` are M
    triples (inputs [n, 3], targets [n], weight), the same on all ranks. All activations are
    [n, 3]. At the end the parameters of ``layers`` have the gradients of one device. Target: one
    message for each that the stream sends, one call of comm per hop.
    """
    exercise = Exercise(
        "pipeline.step",
        _step_alone,
        inputs=lambda rank, case: (case,),
        signature="comm, layers, stream, micro_batches",
        call=_step_by,
        written=None,
        target=_messages_of_step,
        mistakes=_STEP_MISTAKES,
        sizes=(5, 4, 1),
        nouns=("stage", "micro-batch"),
        case_words=_STREAM_WORDS,
        may_call=frozenset({"carry_out"}),
    )
    verdict = grade(fn, exercise, world_sizes)
    # Drawn with stages that take their time, so that the picture is a timetable.
    drawn = replace(exercise, call=partial(_step_by, sample_s=_DRAWN_S))
    verdict.run_again = partial(own_run, fn, drawn)
    return verdict


# The bubble of a timetable


def _share_of(fn: Callable, slots: list[Slot]) -> float:
    answer = fit(fn(slots), 0.0)
    if answer is None:
        raise Wrong(Mistake("answer.nothing"))
    if kind := other_kind(answer, 0.0):
        raise Wrong(kind)
    return float(answer)


def _wrong_bubble(question: Question, answer: float) -> Mistake | None:
    if agree(answer, question.due):
        return None
    return Mistake("bubble.differs", case=question.words, due=question.due, answer=answer)


def _tables() -> dict[str, list[Slot]]:
    """The last three reveal mistakes that do not show in a textbook's timetable."""
    gpipe, one_f_one_b = schedules.gpipe, schedules.one_f_one_b
    late = [
        slot._replace(start_s=slot.start_s + 10, end_s=slot.end_s + 10)
        for slot in _table(gpipe, (1.0, 1.0), 2)
    ]
    return {
        "GPipe, 3 stages, 4 micro-batches": _table(gpipe, (1.0,) * 3, 4),
        "1F1B, 4 stages, 2 micro-batches": _table(one_f_one_b, (1.0,) * 4, 2),
        "a single stage, 3 micro-batches": _table(gpipe, (1.0,), 3),
        "GPipe, 3 micro-batches, stages of 1, 3 and 2 s": _table(gpipe, (1.0, 3.0, 2.0), 3),
        "GPipe, 2 stages, 2 micro-batches, from second 10 on": late,
    }


def _table(schedule: Callable, forward_s: Sequence[float], micro_batches: int) -> list[Slot]:
    P = len(forward_s)
    rows = [list(schedule(stage, P, micro_batches)) for stage in range(P)]
    return predicted_slots(rows, forward_s, [BACKWARD_S * s for s in forward_s])


def _stages(slots: Iterable[Slot]) -> set[int]:
    return {slot.stage for slot in slots}


def _start_s(slots: Iterable[Slot]) -> float:
    return min(slot.start_s for slot in slots)


def _end_s(slots: Iterable[Slot]) -> float:
    return max(slot.end_s for slot in slots)


def _busy_s(slots: Iterable[Slot]) -> float:
    return sum(slot.end_s - slot.start_s for slot in slots)


def _idle_over(seconds: float, slots: Sequence[Slot]) -> float:
    return 1 - _busy_s(slots) / (len(_stages(slots)) * seconds)


def _between_actions(slots: Sequence[Slot]) -> float:
    rows = [[slot for slot in slots if slot.stage == stage] for stage in _stages(slots)]
    gaps_s = sum(_end_s(row) - _start_s(row) - _busy_s(row) for row in rows)
    return gaps_s / (len(rows) * (_end_s(slots) - _start_s(slots)))


def _by_formula(slots: Sequence[Slot]) -> float:
    waiting = len(_stages(slots)) - 1
    return waiting / (len({slot.micro_batch for slot in slots}) + waiting)


_BUBBLE_MISTAKES: dict[str, Callable[[list[Slot]], float]] = {
    "bubble.work": lambda s: 1 - idle_share(s),
    "bubble.of_working": lambda s: idle_share(s) / (1 - idle_share(s)),
    "bubble.of_step": lambda s: len(_stages(s)) * idle_share(s),
    "bubble.formula": _by_formula,
    "bubble.from_zero": lambda s: _idle_over(_end_s(s), s),
    "bubble.last_in_list": lambda s: _idle_over(s[-1].end_s - _start_s(s), s),
    "bubble.inner_gaps": _between_actions,
    "bubble.percent": lambda s: 100 * idle_share(s),
}


# The 1F1B stream, executed


def _model(P: int) -> nn.Sequential:
    layers = [nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.float64) for _ in range(P)]
    return with_parameters(nn.Sequential(*layers), P)


def _batch() -> tuple[Tensor, Tensor]:
    """Inputs [7, _WIDTH] and targets [7]: 5 micro-batches of 2, 2, 1, 1 and 1 samples."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(7, _WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(_WIDTH, (7,), generator=generator)


def _train_by(fn: Callable, comm: Comm) -> list[Tensor | None]:
    """Run this rank's stage by ``fn``'s stream; return its gradients, by parameter."""
    stage = StagedModel(range(1, comm.world_size))
    stage.setup(comm, _model(comm.world_size), torch.optim.SGD)
    inputs, targets = _batch()
    micro_batches = stage.start(inputs, targets, len(targets), _MICRO_BATCHES)
    actions = stream_of(fn, comm.rank, comm.world_size, micro_batches)
    for step in with_hops(actions, comm.rank, comm.world_size):
        stage.do(step)
    return [parameter.grad for parameter in stage.module.parameters()]


def _gradients_alone(rank: int, case: Case) -> list[Tensor | None]:
    """The gradients of layer ``rank``, that rank's stage, in one process."""
    model, (inputs, targets) = _model(case.world_size), _batch()
    functional.cross_entropy(model(inputs), targets).backward()
    return [parameter.grad for parameter in model[rank].parameters()]


# The hop, carried out


def _hops(rank: int, P: int) -> list[Hop]:
    actions = schedules.one_f_one_b(rank, P, _MICRO_BATCHES)
    return [step for step in with_hops(actions, rank, P) if isinstance(step, Hop)]


def _payload(message: Message, source: int) -> Tensor:
    """[3]: 1 for a gradient or 0 for an activation, the micro-batch, the sending rank."""
    return torch.tensor([float(message.kind == "gradient"), message.micro_batch, source])


def _play(fn: Callable, comm: Comm) -> tuple[list[list[float]], int, int]:
    """Carry out all hops of a step: what landed, the calls of comm, the number of hops."""
    landed, hops, before = [], _hops(comm.rank, comm.world_size), comm.operations
    for one in hops:
        outgoing = _payload(one.send, comm.rank) if one.send else None
        landing = torch.full((3,), -1.0) if one.recv else None
        fn(comm, one, outgoing, landing)
        if landing is not None:
            landed.append(landing.tolist())
    return landed, comm.operations - before, len(hops)


def _messages_of_hops(rank: int, case: Case) -> Target:
    return Target(sum(one.send is not None for one in _hops(rank, case.world_size)))


def _judge_hops(case: Case, values: list[Any]) -> Mistake | None:
    for rank, (landed, _, _) in enumerate(values):
        due = [one.recv for one in _hops(rank, case.world_size) if one.recv]
        for message, found in zip(due, landed):
            if found == _payload(message, message.peer).tolist():
                continue
            kind, of, by = found
            id = "hop.never_landed" if found == [-1.0] * 3 else "hop.other_landed"
            expected = {"kind": message.kind, "micro_batch": message.micro_batch, "rank": rank}
            came = {"source": message.peer, "found": "gradient" if kind else "activation"}
            return Mistake(id, **expected, **came, of=of, by=by)
    for rank, (_, calls, hops) in enumerate(values):
        if calls != hops:
            return Mistake("hop.calls", rank=rank, calls=calls, hops=hops)
    return None


# The step


_STREAM_WORDS = {5: "by the streams of 1F1B", 4: "by the streams of GPipe"}


def _step_stream(rank: int, case: Case) -> list[Action | Hop]:
    schedule = schedules.gpipe if case.size == 4 else schedules.one_f_one_b
    return [*with_hops(schedule(rank, case.world_size, case.size), rank, case.world_size)]


def _step_parts(case: Case) -> list[tuple[Tensor, Tensor, float]]:
    """M micro-batches of M + 2 samples: the first ones have a sample more than the others."""
    n = case.size + 2
    targets = torch.tensor([case.integer(key, 0, _WIDTH - 1) for key in range(n)])
    parts = zip(case.random(n, n, _WIDTH).tensor_split(case.size), targets.tensor_split(case.size))
    return [(inputs, answers, len(answers) / n) for inputs, answers in parts]


def _step_layers(rank: int) -> nn.Sequential:
    return with_parameters(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()), 31 + rank)


def _step_by(
    fn: Callable, comm: Comm, case: Case, sample_s: float = 0.0
) -> list[Tensor | None] | Mistake:
    """On the rank: the gradients that ``fn`` leaves, by parameter, if it has run the stream."""
    layers, ran = _step_layers(comm.rank), []
    if sample_s:
        layers.insert(1, EmulatedLayer(sample_s))
    layers[0].register_forward_pre_hook(lambda *_: ran.append("F"))
    layers[-1].register_forward_hook(lambda *parts: _note_backward(parts[-1], ran))
    stream = _step_stream(comm.rank, case)
    fn(comm, layers, stream, _step_parts(case))
    due = [str(one)[0] for one in stream if isinstance(one, Action)]
    if ran != due:
        return Mistake("stage_step.order", found=" ".join(ran) or "nothing", due=" ".join(due))
    gradients = [parameter.grad for parameter in layers[0].parameters()]
    return Mistake("stage_step.no_gradients") if any(g is None for g in gradients) else gradients


def _note_backward(output: Any, ran: list[str]) -> None:
    if output.requires_grad:
        output.register_hook(lambda _: ran.append("B"))


def _step_alone(
    rank: int, case: Case, weight: Callable = lambda of, n: of, first: int = 0
) -> list[Tensor | None]:
    """The gradients of stage ``rank`` in one process; the options are for mistakes.

    Args:
        rank: the stage.
        case: P and M.
        weight: (weight, samples of the micro-batch) -> what its mean loss is multiplied by.
        first: the first micro-batch whose gradient is added.
    """
    layers = nn.Sequential(*(_step_layers(stage) for stage in range(case.world_size)))
    for inputs, targets, of in _step_parts(case)[first:]:
        loss = functional.cross_entropy(layers(inputs), targets)
        (weight(of, len(targets)) * loss).backward()
    return [parameter.grad for parameter in layers[rank].parameters()]


def _messages_of_step(rank: int, case: Case) -> Target:
    hops = [one for one in _step_stream(rank, case) if isinstance(one, Hop)]
    return Target(sum(one.send is not None for one in hops), operations=len(hops))


_STEP_MISTAKES = {
    "stage_step.weights": partial(_step_alone, weight=lambda of, n: 1.0),
    "stage_step.sums": partial(_step_alone, weight=lambda of, n: of * n),
    "stage_step.last_only": lambda rank, case: _step_alone(rank, case, first=case.size - 1),
}
