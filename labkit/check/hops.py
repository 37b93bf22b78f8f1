"""The checks of page 08 with ranks: a stage's forward with its hops, and its backward.

Symbols: P ranks and stages, n samples. Every stage takes and makes [n, 4], so that a tensor that
is sent in the place of another arrives, and the mistake can be named.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from labkit.check.grading.compare import misshapen, same
from labkit.check.grading.core import WORLD_SIZES, grade
from labkit.check.grading.exercise import Case, Exercise, Target
from labkit.check.grading.report import Verdict
from labkit.comm.comm import Comm

_SAMPLES, _WIDTH = 5, 4
_MESSAGE_BYTES = 4 * _SAMPLES * _WIDTH


def forward(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, layers, inputs)``, the forward of one stage, with its hops.

    Stage 0 takes ``inputs`` [n, 4], any other what the stage before sends. It runs ``layers``
    once, sends what comes out to the next stage, and returns ``(entering, leaving)``, with
    autograd's graph between the two; ``entering`` collects a gradient where one has to go back.
    """
    exercise = Exercise(
        "hops.forward",
        signature="comm, layers, inputs",
        inputs=lambda rank, case: (_stage(rank), _inputs()),
        written=None,
        call=_seen_forward,
        judge=_judge_forward,
        target=_to_the_next,
        sizes=(),
    )
    return grade(fn, exercise, world_sizes)


def backward(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, entering, leaving)``, the backward of one stage, with its hops.

    On the last stage ``leaving`` is the loss, on any other [n, 4], whose gradient the next stage
    sends. At the end all parameters have the gradient that they have on one device.
    """
    exercise = Exercise(
        "hops.backward",
        lambda rank, case: _gradients(case.world_size)[rank],
        signature="comm, entering, leaving",
        inputs=lambda rank, case: (),
        written=None,
        call=_gradients_of,
        mistakes={
            sentence: lambda rank, case, options=options: _gradients(case.world_size, **options)[
                rank
            ]
            for sentence, options in _BACKWARD_MISTAKES.items()
        },
        target=_to_the_one_before,
        sizes=(),
    )
    return grade(fn, exercise, world_sizes)


def _stage(rank: int) -> nn.Module:
    generator = torch.Generator().manual_seed(11 + rank)
    layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh())
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layers


def _inputs() -> Tensor:
    return torch.randn(_SAMPLES, _WIDTH, generator=torch.Generator().manual_seed(3))


def _to_the_next(rank: int, case: Case) -> Target:
    last = rank == case.world_size - 1
    return _one_message(None if last else rank + 1, steps=(rank > 0) + (not last))


def _to_the_one_before(rank: int, case: Case) -> Target:
    last = rank == case.world_size - 1
    return _one_message(rank - 1 if rank else None, steps=(rank > 0) + (not last))


def _one_message(peer: int | None, steps: int) -> Target:
    if peer is None:
        return Target(0, 0, steps, frozenset())
    return Target(1, _MESSAGE_BYTES, steps, frozenset([peer]))


# Forward


class _Seen(NamedTuple):
    """What a rank's forward left behind."""

    entering: Tensor
    leaving: Tensor
    runs: int
    in_graph: bool
    asks: bool
    is_leaf: bool
    collects: bool


def _seen_forward(fn: Callable, comm: Comm, layers: nn.Module, inputs: Tensor) -> _Seen | str:
    """On the rank: call ``fn``, and try whether a gradient would come out at the other end."""
    runs: list[int] = []
    layers.register_forward_hook(lambda *_: runs.append(1))
    found = fn(comm, layers, inputs)
    pair = isinstance(found, (tuple, list)) and len(found) == 2
    if not pair or not all(isinstance(one, Tensor) for one in found):
        return "it returns something else than (entering, leaving), two tensors"
    entering, leaving = found
    values = entering.detach().clone(), leaving.detach().clone()
    looks = leaving.requires_grad, entering.requires_grad, entering.is_leaf
    if leaving.requires_grad:
        leaving.sum().backward()
    return _Seen(*values, len(runs), *looks, entering.is_leaf and entering.grad is not None)


def _judge_forward(case: Case, values: list[_Seen | str]) -> str | None:
    for rank, seen in enumerate(values):
        if isinstance(seen, str):
            return f"rank {rank}: {seen}"
        sentence = _wrong_values(rank, seen) or _wrong_graph(rank, seen)
        if sentence:
            return f"rank {rank} is the first that is wrong: {sentence}"
    return None


@torch.no_grad()
def _after(num_stages: int) -> Tensor:
    """[n, 4]: what leaves the first so many stages."""
    value = _inputs()
    for rank in range(num_stages):
        value = _stage(rank)(value)
    return value


def _wrong_values(rank: int, seen: _Seen) -> str:
    due = {"entering": _after(rank), "leaving": _after(rank + 1)}
    for name, value in due.items():
        found = getattr(seen, name)
        if same(found, value):
            continue
        if other_shape := misshapen(found, value):
            return f"{name}: {other_shape}"
        return f"{name} {_look(rank, name, found)}"
    return ""


def _look(rank: int, name: str, found: Tensor) -> str:
    with torch.no_grad():
        skipped = same(found, _stage(rank)(_inputs()))
    if name == "leaving":
        if skipped:
            return "is made of inputs, which enter stage 0 alone: run the layers on what came in"
        if same(found, _after(rank)):
            return "is what entered: the layers did not run"
        return "is not what the layers make of what entered"
    if same(found, _after(rank - 1)):
        return (
            f"is what had entered stage {rank - 1}, too: what leaves a stage has to be sent, not "
            "what entered it"
        )
    if same(found, _after(rank + 1)):
        return "is what the layers made: return what went into them first, what came out second"
    return f"is not what left stage {rank - 1}: was it sent before the layers had run?"


def _wrong_graph(rank: int, seen: _Seen) -> str:
    if seen.runs != 1:
        return f"its layers ran {seen.runs} times, where once is due"
    if not seen.in_graph:
        return (
            "leaving has no graph behind it, and backward could not begin there: only what is "
            "sent may be detached, not what is kept (was it computed under no_grad?)"
        )
    if rank == 0 or seen.collects:
        return ""
    if not seen.asks:
        return (
            "entering asks for no gradient, so none could go back to the stage before: "
            "entering.requires_grad_() before the layers run"
        )
    if not seen.is_leaf:
        return (
            "entering is no leaf of the graph (a copy, or a result), and autograd stores no .grad "
            "there: return the very tensor that was received"
        )
    return (
        "entering asks for a gradient and gets none: the layers ran before it asked, or ran on "
        "another tensor"
    )


# Backward


def _ran(rank: int, world_size: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A stage after its forward: layers, what entered, what leaves; of the last one the loss."""
    layers, entering = _stage(rank), _after(rank).requires_grad_(rank > 0)
    leaving = layers(entering)
    if rank == world_size - 1:
        leaving = leaving.square().mean()
    return layers, entering, leaving


def _gradients_of(fn: Callable, comm: Comm) -> list[Tensor]:
    """By parameter."""
    layers, entering, leaving = _ran(comm.rank, comm.world_size)
    fn(comm, entering, leaving)
    found = [parameter.grad for parameter in layers.parameters()]
    if any(gradient is None for gradient in found):
        raise ValueError(
            "the stage's parameters have no gradient: backward has not run (torch.autograd.grad "
            "returns gradients and stores none; leaving.backward(gradient) stores them)"
        )
    return found


def _from_what_came(leaving: Tensor, gradient: Tensor | None) -> Tensor | None:
    return gradient


def _of_what_entered(entering: Tensor, gradient: Tensor | None, world_size: int) -> Tensor:
    return entering.grad


def _gradients(
    world_size: int, begin: Callable = _from_what_came, pass_on: Callable = _of_what_entered
) -> list[list[Tensor]]:
    """By rank and parameter, in one process; each option is a mistake.

    Args:
        world_size: P.
        begin: of what leaves a stage and the gradient that came: what its backward begins with.
        pass_on: of what entered, the gradient that came, and P: what goes to the stage before.
    """
    found, gradient = [], None
    for rank in reversed(range(world_size)):
        layers, entering, leaving = _ran(rank, world_size)
        leaving.backward(begin(leaving, gradient))
        found.append([parameter.grad for parameter in layers.parameters()])
        if rank:
            gradient = pass_on(entering, gradient, world_size)
    return found[::-1]


def _plus(entering: Tensor, gradient: Tensor | None, world_size: int) -> Tensor:
    return entering.grad if gradient is None else entering.grad + gradient


_BACKWARD_MISTAKES: dict[str, dict[str, Callable]] = {
    "the gradient that came is not used: backward began with ones": {
        "begin": lambda leaving, gradient: torch.ones_like(leaving)
    },
    "a stage passes on the gradient that it got; what goes back is that of what had entered, "
    "entering.grad": {
        "pass_on": lambda entering, gradient, P: entering.grad if gradient is None else gradient
    },
    "the activation went back, where its gradient is due: entering.grad": {
        "pass_on": lambda entering, gradient, P: entering.detach()
    },
    "the gradient that came is added to entering.grad: the layers' backward has it in already": {
        "pass_on": _plus
    },
    "a gradient was divided by the number of ranks on its way: these are parts of one model, no "
    "replicas, and nothing is averaged": {
        "pass_on": lambda entering, gradient, P: entering.grad / P
    },
    "backward ran twice, and gradients add up": {
        "begin": lambda leaving, gradient: 2 * (torch.ones(()) if gradient is None else gradient)
    },
    "what went back is all zeros: was .grad taken after it had been zeroed, or never filled?": {
        "pass_on": lambda entering, gradient, P: torch.zeros_like(entering)
    },
}
