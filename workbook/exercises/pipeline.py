"""Page 09: micro-batches, the streams of a stage, a hop, and the step.

Symbols: P stages and ranks, M micro-batches, n samples, s a stage.
"""

import itertools
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
from labkit.schedules.pipeline import Action, Hop, with_hops
from labkit.strategies.stage import StagedModel
from labkit.units import format_count
from labkit.workload.layers import EmulatedLayer
from workbook.exercises.grader import (
    WORLD_SIZES,
    Case,
    Exercise,
    Target,
    Verdict,
    Wrong,
    ask,
    grade,
    returns,
)
from workbook.exercises.grader.compare import agree, fit, plain, short
from workbook.exercises.grader.exercise import Found, random_tensor, with_parameters
from workbook.exercises.grader.in_process import Question
from workbook.exercises.grader.own_run import own_run
from workbook.exercises.grader.report import announces_a_stop, told
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

# (n, M, shape of a sample), most telling first.
_BATCHES = ((7, 3, (2,)), (8, 4, (2,)), (3, 5, (2,)), (6, 4, (1, 2, 2)), (6, 1, (2,)))


def micro_batches(fn: Callable) -> Verdict:
    """Grade ``fn(inputs, targets, count)``: a batch cut into micro-batches, with weights.

    Returned are triples (inputs, targets, weight), as even as possible and at most one per
    sample. The weighted sum of their mean losses has to be the mean loss of the batch. Runs
    without ranks.
    """
    questions = []
    for key, (n, count, shape) in enumerate(_BATCHES):
        # All targets of a batch differ, so that each sample can be told.
        targets = torch.randperm(n, generator=torch.Generator().manual_seed(key))
        words = f"{format_count(n, 'sample')}, count {count}"
        questions.append(Question((random_tensor(key, n, *shape), targets, count), words))
    return ask(
        "pipeline.micro_batches",
        fn,
        questions,
        _wrong_parts,
        call=_parts_of,
        right=lambda answers: f"all {len(answers)} batches are cut well",
        signature="inputs, targets, count",
    )


def _parts_of(fn: Callable, inputs: Tensor, targets: Tensor, count: int) -> list[tuple] | Wrong:
    """The triples that ``fn`` returns or yields, the first two entries as tensors."""
    found, returned = [], fn(inputs, targets, count)
    if not isinstance(returned, Iterable):
        return Wrong(f"the function returned {short(returned)}: expected triples")
    # An endless generator must not hang the check.
    for one in itertools.islice(returned, 2 * len(targets) + 2):
        many = isinstance(one, Iterable) and not isinstance(one, str | Tensor)
        entries = list(one.values() if isinstance(one, dict) else one) if many else []
        if len(entries) != 3:
            return Wrong(f"{short(one)} is no triple (inputs, targets, weight)")
        found.append((_rows(entries[0]), _rows(entries[1]), plain(entries[2])))
    return found


def _rows(value: Any) -> Any:
    """A tensor of samples, if ``value`` is one in any clothes."""
    value = plain(value)
    try:
        rows = [torch.as_tensor(row) for row in value] if isinstance(value, list) else []
        return torch.stack(rows) if rows else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return value


def _wrong_parts(question: Question, parts: list[tuple]) -> Found:
    (inputs, targets, count), text = question.args, f"{question.words}: "
    n, place = len(targets), {target: row for row, target in enumerate(targets.tolist())}
    for m, (x, y, _) in enumerate(parts):
        shapes = [list(getattr(one, "shape", ["none"])) for one in (x, y)]
        if len(shapes[1]) != 1 or shapes[0] != [*shapes[1], *inputs.shape[1:]]:
            return f"{text}micro-batch {m} has inputs {shapes[0]} and targets {shapes[1]}"
    sizes = [len(y) for _, y, _ in parts]
    text += f"the micro-batches have {sizes} samples"
    if len(parts) != min(count, n) or 0 in sizes:
        return f"{text}, expected {min(count, n)} that are not empty"
    if sorted(int(t) for _, y, _ in parts for t in y) != sorted(targets.tolist()):
        return f"{text}; samples are lost, or there twice"
    for m, (x, y, _) in enumerate(parts):
        if not agree(x.double(), inputs[[place[int(t)] for t in y]].double()):
            return f"{text}; in micro-batch {m} inputs and targets do not belong together"
    if max(sizes) - min(sizes) > 1:
        return f"{text}: these may differ by one at most"
    weights, expected = [weight for *_, weight in parts], [size / n for size in sizes]
    if agree(weights, expected):
        return None
    return f"{text}, but weights {short(weights)}, expected {short(expected)}"


def gpipe(fn: Callable) -> Verdict:
    """Grade ``fn(stage, num_stages, num_micro_batches)``: the actions of a stage by GPipe.

    All forwards come first, then all backwards, in an order that is the same on every stage. Runs
    without ranks.
    """
    name = "pipeline.gpipe"
    verdict = told(name, partial(judged_on_paper, name, fn, wrong_gpipe))
    return with_timetable(verdict, fn, schedules.gpipe)


def bubble(fn: Callable) -> Verdict:
    """Grade ``fn(slots)``: the idle share, 0 to 1, of a timetable's stages. Runs without ranks.

    ``slots`` is a list of ``labkit.costs.pipeline_timeline.Slot``, in any order; the first one may
    start at any second.
    """

    def table(schedule: Callable, forward_s: Sequence[float], M: int) -> list[Slot]:
        P = len(forward_s)
        rows = [list(schedule(stage, P, M)) for stage in range(P)]
        return predicted_slots(rows, forward_s, [BACKWARD_S * s for s in forward_s])

    def by_formula(slots: Sequence[Slot]) -> float:
        waiting = len({slot.stage for slot in slots}) - 1
        return waiting / (len({slot.micro_batch for slot in slots}) + waiting)

    late = [
        slot._replace(start_s=slot.start_s + 10, end_s=slot.end_s + 10)
        for slot in table(schedules.gpipe, (1.0, 1.0), 2)
    ]
    # The last three reveal mistakes that do not show in a textbook's timetable.
    tables = {
        "GPipe, 3 stages, 4 micro-batches": table(schedules.gpipe, (1.0,) * 3, 4),
        "1F1B, 4 stages, 2 micro-batches": table(schedules.one_f_one_b, (1.0,) * 4, 2),
        "a single stage, 3 micro-batches": table(schedules.gpipe, (1.0,), 3),
        "GPipe, stages of 1, 3 and 2 s": table(schedules.gpipe, (1.0, 3.0, 2.0), 3),
        "GPipe, 2 stages, from second 10 on": late[::-1],
    }
    return ask(
        "pipeline.bubble",
        fn,
        [Question((slots,), words, idle_share(slots)) for words, slots in tables.items()],
        lambda question, found: (
            None
            if agree(found, question.expected)
            else f"{question.words}: the idle share is {question.expected:.4g}, the function "
            f"returned {short(found)}"
        ),
        mistakes={
            "it is the share of the work, not of the idle time": lambda s: 1 - idle_share(s),
            "the formula holds for equal stages only: count in the timetable": by_formula,
        },
        call=lambda fn, slots: fit(fn(slots), 0.0),
    )


def one_f_one_b(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(stage, num_stages, num_micro_batches)``: the actions of a stage by 1F1B.

    The streams are first judged on paper: they have to contain each action once, in an order that
    can finish, hold no more micro-batches and take no longer than 1F1B. If they are, each rank
    trains its stage by its stream, and has to get the gradients of one device.
    """

    def model(P: int) -> nn.Sequential:
        layers = [nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.float64) for _ in range(P)]
        return with_parameters(nn.Sequential(*layers), P)

    def batch(case: Case) -> tuple[Tensor, Tensor]:
        """Inputs [7, _WIDTH] and targets [7]: 5 micro-batches of 2, 2, 1, 1 and 1 samples."""
        return case.random(0, 7, _WIDTH).double(), torch.arange(7) % _WIDTH

    def train(fn: Callable, comm: Comm, case: Case) -> list[Tensor | None]:
        stage = StagedModel(range(1, comm.world_size))
        stage.setup(comm, model(comm.world_size), torch.optim.SGD)
        inputs, targets = batch(case)
        micro_batches = stage.start(inputs, targets, len(targets), _MICRO_BATCHES)
        actions = stream_of(fn, comm.rank, comm.world_size, micro_batches)
        for step in with_hops(actions, comm.rank, comm.world_size):
            stage.do(step)
        return [parameter.grad for parameter in stage.module.parameters()]

    def alone(rank: int, case: Case) -> list[Tensor | None]:
        layers, (inputs, targets) = model(case.world_size), batch(case)
        functional.cross_entropy(layers(inputs), targets).backward()
        return [parameter.grad for parameter in layers[rank].parameters()]

    name = "pipeline.one_f_one_b"
    with announces_a_stop(name):
        verdict = judged_on_paper(name, fn, wrong_one_f_one_b)
    if not verdict:
        told(name, lambda: verdict)
    else:
        verdict = returns(
            fn,
            alone,
            name=name,
            inputs=lambda rank, case: (case,),
            signature=STREAM_NAMES,
            call=train,
            world_sizes=world_sizes,
        )
    return with_timetable(verdict, fn, schedules.one_f_one_b)


def hop(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, hop, outgoing, landing)``: carry out one ``schedules.Hop``.

    ``outgoing`` is the tensor to send and ``landing`` the tensor to receive into; None if the hop
    does not send, or does not receive. All hops of a 1F1B step are carried out. Target: one
    call of comm per hop.
    """

    def hops(rank: int, P: int) -> list[Hop]:
        actions = schedules.one_f_one_b(rank, P, _MICRO_BATCHES)
        return [step for step in with_hops(actions, rank, P) if isinstance(step, Hop)]

    def payload(message: Any, source: int) -> Tensor:
        """[3]: 1 for a gradient or 0 for an activation, the micro-batch, the sending rank."""
        return torch.tensor([float(message.kind == "gradient"), message.micro_batch, source])

    def play(fn: Callable, comm: Comm) -> list[tuple]:
        landed = []
        for one in hops(comm.rank, comm.world_size):
            outgoing = payload(one.send, comm.rank) if one.send else None
            landing = torch.full((3,), -1.0) if one.recv else None
            fn(comm, one, outgoing, landing)
            landed += [] if landing is None else [landing.tolist()]
        return landed

    def judge(case: Case, values: list[Any]) -> Found:
        def words(kind: float, micro_batch: float, source: float) -> str:
            what = "gradient" if kind else "activation"
            return f"the {what} of micro-batch {micro_batch:g} from rank {source:g}"

        for rank, landed in enumerate(values):
            messages = [one.recv for one in hops(rank, case.world_size) if one.recv]
            for message, found in zip(messages, landed):
                expected = payload(message, message.peer).tolist()
                if found != expected:
                    what = "nothing" if found == [-1.0] * 3 else words(*found)
                    return f"on rank {rank}, landing holds {what}, expected {words(*expected)}"
        return None

    def target(rank: int, case: Case) -> Target:
        own = hops(rank, case.world_size)
        return Target(sum(one.send is not None for one in own), operations=len(own))

    def one_call_each(case: Case, ranks: Any) -> Found:
        for rank, outcome in enumerate(ranks):
            if outcome.operations != (count := len(hops(rank, case.world_size))):
                text = f"rank {rank} makes {outcome.operations} calls of comm for {count} hops"
                return f"{text}: a hop that sends and receives is one comm.exchange"
        return None

    return returns(
        fn,
        name="pipeline.hop",
        signature="comm, hop, outgoing, landing",
        call=play,
        judge=judge,
        target=target,
        rule=one_call_each,
        world_sizes=world_sizes,
    )


def step(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, layers, stream, micro_batches)``: one stage's part of a training step.

    ``stream`` holds the stage's Actions and Hops, by 1F1B or by GPipe; ``micro_batches`` are M
    triples (inputs [n, 3], targets [n], weight), the same on all ranks. All activations are
    [n, 3]. At the end the parameters of ``layers`` have the gradients of one device. Target: one
    message for each that the stream sends, one call of comm per hop.
    """
    words = {5: "by the streams of 1F1B", 4: "by the streams of GPipe"}

    def weighed(weight: Callable, rank: int, case: Case) -> list[Tensor | None]:
        """The gradients of one device, if a mean loss counts ``weight(its weight, samples)``."""
        layers = nn.Sequential(*(_step_layers(stage) for stage in range(case.world_size)))
        for inputs, targets, of in _step_parts(case):
            loss = functional.cross_entropy(layers(inputs), targets)
            (weight(of, len(targets)) * loss).backward()
        return [parameter.grad for parameter in layers[rank].parameters()]

    def target(rank: int, case: Case) -> Target:
        hops = [one for one in _step_stream(rank, case) if isinstance(one, Hop)]
        return Target(sum(one.send is not None for one in hops), operations=len(hops))

    exercise = Exercise(
        "pipeline.step",
        partial(weighed, lambda of, n: of),
        inputs=lambda rank, case: (case,),
        signature="comm, layers, stream, micro_batches",
        call=_step_by,
        written=None,
        target=target,
        mistakes={
            "the loss of a micro-batch is not multiplied by its weight": partial(
                weighed, lambda of, n: 1.0
            ),
            "the loss of a micro-batch is a sum over its samples: its weight is for the mean": (
                partial(weighed, lambda of, n: of * n)
            ),
        },
        sizes=(5, 4, 1),
        nouns=("stage", "micro-batch"),
        special=lambda case: words.get(case.size, ""),
        may_call=frozenset({"carry_out"}),
    )
    verdict = grade(fn, exercise, world_sizes)
    # Drawn with stages that take their time, so that the picture is a timetable.
    drawn = replace(exercise, call=partial(_step_by, sample_s=_DRAWN_S))
    verdict.run_again = partial(own_run, fn, drawn)
    return verdict


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
) -> list[Tensor | None] | Wrong:
    """On the rank: the gradients that ``fn`` leaves, by parameter, if it has run the stream."""
    layers, ran = _step_layers(comm.rank), []

    def note_forward(*_: Any) -> None:
        ran.append("F")

    def note_backward(layer: nn.Module, given: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: ran.append("B"))

    if sample_s:
        layers.insert(1, EmulatedLayer(sample_s))
    layers[0].register_forward_pre_hook(note_forward)
    layers[-1].register_forward_hook(note_backward)
    stream = _step_stream(comm.rank, case)
    fn(comm, layers, stream, _step_parts(case))
    expected = [str(one)[0] for one in stream if isinstance(one, Action)]
    if ran != expected:
        found = " ".join(ran) or "nothing"
        text = f"the layers ran in the order {found} (F: forward, B: backward), the stream says "
        return Wrong(text + " ".join(expected))
    gradients = [parameter.grad for parameter in layers[0].parameters()]
    if any(gradient is None for gradient in gradients):
        return Wrong("some parameters have no gradient at the end")
    return gradients
