"""The checks of page 09: the bubble of a timetable, the 1F1B stream, the hop between two stages.

Symbols: P stages and ranks, M micro-batches.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit import schedules
from labkit.check.grading.core import WORLD_SIZES, grade
from labkit.check.grading.exercise import Case, Exercise, Target
from labkit.check.grading.report import Verdict, told
from labkit.check.pipeline_bubble import bubble
from labkit.check.pipeline_streams import on_paper, stream_of
from labkit.comm.comm import Comm
from labkit.schedules.pipeline import Hop, Message, with_hops
from labkit.strategies.stage import Stage

__all__ = ["bubble", "hop", "one_f_one_b"]

_WIDTH, _MICRO_BATCHES = 3, 5


def one_f_one_b(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(stage, num_stages, num_micro_batches)``: the actions of a stage by 1F1B.

    On paper first: each action once, in an order that can finish, no more micro-batches held and
    no longer a step than 1F1B has. Such streams are then executed: each rank trains its stage by
    them, and has to find the gradients of one device.
    """
    name = "pipeline.one_f_one_b"
    verdict = on_paper(name, fn)
    if verdict is not None:
        return told(name, lambda: verdict)
    exercise = Exercise(
        name,
        expected=_gradients_alone,
        inputs=lambda rank, case: (),
        signature="stage, num_stages, num_micro_batches",
        written=None,
        call=_train_by,
        sizes=(),
    )
    return grade(fn, exercise, world_sizes)


def hop(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, hop, outgoing, landing)``: carry out one ``schedules.Hop``.

    ``outgoing`` is what to send and ``landing`` the memory to receive into; None where the hop has
    no such half. All hops of a 1F1B step are played. Target: one call of comm a hop.
    """
    exercise = Exercise(
        "pipeline.hop",
        inputs=lambda rank, case: (),
        signature="comm, hop, outgoing, landing",
        written=None,
        call=_play,
        judge=_judge_hops,
        target=_messages_of_hops,
        sizes=(),
    )
    return grade(fn, exercise, world_sizes)


# The 1F1B stream, executed


def _model(P: int) -> nn.Sequential:
    generator = torch.Generator().manual_seed(P)
    layers = [nn.utils.skip_init(nn.Linear, _WIDTH, _WIDTH, dtype=torch.float64) for _ in range(P)]
    with torch.no_grad():
        for layer in layers:
            layer.weight.copy_(torch.randn(_WIDTH, _WIDTH, generator=generator))
            layer.bias.zero_()
    return nn.Sequential(*layers)


def _batch() -> tuple[Tensor, Tensor]:
    """Inputs [7, _WIDTH] and targets [7]: 5 micro-batches of 2, 2, 1, 1 and 1 samples."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(7, _WIDTH, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(_WIDTH, (7,), generator=generator)


def _train_by(fn: Callable, comm: Comm) -> list[Tensor]:
    """Forward and backward of this rank's stage by ``fn``'s stream: its gradients."""
    split_points = range(1, comm.world_size)
    stage = Stage(comm, _model(comm.world_size), split_points, make_optimizer=list)
    inputs, targets = _batch()
    stage.start(inputs, targets, len(targets), _MICRO_BATCHES)
    actions = stream_of(fn, stage.index, stage.count, stage.micro_batches)
    for step in with_hops(actions, stage.index, stage.count):
        stage.do(step)
    return [parameter.grad for parameter in stage.module.parameters()]


def _gradients_alone(rank: int, case: Case) -> list[Tensor]:
    """Of layer ``rank``, which is that rank's stage."""
    model, (inputs, targets) = _model(case.world_size), _batch()
    functional.cross_entropy(model(inputs), targets).backward()
    return [parameter.grad for parameter in model[rank].parameters()]


# The hop, played


def _hops(rank: int, P: int) -> list[Hop]:
    actions = schedules.one_f_one_b(rank, P, _MICRO_BATCHES)
    return [step for step in with_hops(actions, rank, P) if isinstance(step, Hop)]


def _payload(message: Message, source: int) -> Tensor:
    """[3]: what it is, of which micro-batch, from whom."""
    return torch.tensor([float(message.kind == "gradient"), message.micro_batch, source])


def _play(fn: Callable, comm: Comm) -> tuple[list[list[float]], int, int]:
    """All hops of a step, without the work between them: what landed; calls of comm, and hops."""
    landed, hops, before = [], _hops(comm.rank, comm.world_size), comm.operations
    for one in hops:
        outgoing = one.send and _payload(one.send, comm.rank)
        landing = one.recv and torch.full((3,), -1.0)
        fn(comm, one, outgoing, landing)
        if one.recv:
            landed.append(landing.tolist())
    return landed, comm.operations - before, len(hops)


def _messages_of_hops(rank: int, case: Case) -> Target:
    return Target(sum(one.send is not None for one in _hops(rank, case.world_size)))


def _judge_hops(case: Case, values: list[Any]) -> str | None:
    for rank, (landed, _, _) in enumerate(values):
        due = [one.recv for one in _hops(rank, case.world_size) if one.recv]
        for message, found in zip(due, landed):
            what = f"the {message.kind} of micro-batch {message.micro_batch}, due on rank {rank}"
            if found == [-1.0] * 3:
                return (
                    f"{what}, never landed: receive into landing, in place, since a tensor of "
                    "your own is lost"
                )
            if found != _payload(message, message.peer).tolist():
                kind = "gradient" if found[0] else "activation"
                return (
                    f"{what} from rank {message.peer}, is instead the {kind} of micro-batch "
                    f"{found[1]:g} of rank {found[2]:g}"
                )
    for rank, (_, calls, hops) in enumerate(values):
        if calls != hops:
            return (
                f"everything lands, and rank {rank} takes {calls} calls of comm for {hops} hops: "
                "a hop with both halves is one comm.exchange"
            )
    return None
