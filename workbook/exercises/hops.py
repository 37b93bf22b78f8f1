"""Page 08, with ranks: a stage's forward with its hops, and its backward.

Symbols: P ranks and stages, n samples. The input and the output of every stage are [n, 4], so that
a wrong tensor can be received, too, and the mistake can be named.
"""

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm
from workbook.exercises.grader import WORLD_SIZES, Case, Target, Verdict, Wrong, returns
from workbook.exercises.grader.compare import other_kind, same
from workbook.exercises.grader.exercise import Found, with_parameters

_SAMPLES, _WIDTH = 5, 4
# Samples in a run that is drawn, so that its messages and its computing can be seen.
_DRAWN = 50_000


def forward(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, layers, inputs)``, the forward of one stage, with its hops.

    The stage's input, ``entering`` [n, 4], is ``inputs`` on stage 0, and received from the stage
    before on any other. ``fn`` runs ``layers`` once, sends their output, ``leaving`` [n, 4], to
    the next stage, and returns ``(entering, leaving)``, with autograd's graph between the two. On
    all stages but the first ``entering`` must be able to get a gradient.
    """
    return returns(
        fn,
        name="hops.forward",
        signature="comm, layers, inputs",
        inputs=lambda rank, case: (_stage(rank), _given(rank, case), case),
        call=_look_at_forward,
        target=partial(_target, 1),
        drawn_size=_DRAWN,
        world_sizes=world_sizes,
    )


def backward(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, entering, leaving)``, the backward of one stage, with its hops.

    On the last stage ``leaving`` is the loss; on any other it is [n, 4], and the next stage sends
    its gradient. At the end all parameters must have the gradient that they have on one device.
    """

    def call(fn: Callable, comm: Comm, case: Case) -> list[Tensor | None] | Wrong:
        layers, entering, leaving = _ran(comm.rank, case)
        fn(comm, entering, leaving)
        found = [parameter.grad for parameter in layers.parameters()]
        if any(gradient is None for gradient in found):
            return Wrong("some parameters have no gradient at the end")
        return found

    def gradients(
        rank: int,
        case: Case,
        begin: Callable = lambda leaving, gradient: gradient,
        pass_on: Callable = lambda entering, gradient: entering.grad,
    ) -> list[Tensor | None]:
        """Of a stage, by parameter; the options are for mistakes, by the gradient that came."""
        layers, came = nn.Module(), None
        for stage in reversed(range(rank, case.world_size)):
            layers, entering, leaving = _ran(stage, case)
            leaving.backward(begin(leaving, came))
            came = pass_on(entering, came) if stage else None
        return [parameter.grad for parameter in layers.parameters()]

    return returns(
        fn,
        gradients,
        name="hops.backward",
        signature="comm, entering, leaving",
        inputs=lambda rank, case: (case,),
        call=call,
        mistakes={
            "backward began with ones, and not with the gradient that came": partial(
                gradients, begin=lambda leaving, gradient: torch.ones_like(leaving)
            ),
            "a stage passed on the gradient that came: the one of its own input is asked for": (
                partial(gradients, pass_on=lambda entering, g: entering.grad if g is None else g)
            ),
            "a stage sent back its activation: its gradient is entering.grad": partial(
                gradients, pass_on=lambda entering, gradient: entering.detach()
            ),
        },
        target=partial(_target, -1),
        drawn_size=_DRAWN,
        world_sizes=world_sizes,
    )


def _stage(rank: int) -> nn.Module:
    return with_parameters(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()), 11 + rank)


def _given(rank: int, case: Case) -> Tensor:
    """The ``inputs`` of a rank: other values on each, as only those of stage 0 count."""
    return case.random(30 + rank, case.size or _SAMPLES, _WIDTH)


def _target(step: int, rank: int, case: Case) -> Target:
    """One message to stage rank + ``step``, if it exists; one call of comm per neighbour."""
    peer, calls = rank + step, (rank > 0) + (rank < case.world_size - 1)
    if not 0 <= peer < case.world_size:
        return Target(0, 0, calls, frozenset())
    return Target(1, 4 * (case.size or _SAMPLES) * _WIDTH, calls, frozenset([peer]))


@torch.no_grad()
def _after(num_stages: int, case: Case) -> Tensor:
    """The output of the first ``num_stages`` stages, [n, 4]."""
    value = _given(0, case)
    for rank in range(num_stages):
        value = _stage(rank)(value)
    return value


def _look_at_forward(
    fn: Callable, comm: Comm, layers: nn.Module, inputs: Tensor, case: Case
) -> Wrong | None:
    """On the rank: call ``fn``, and test whether backward would give ``entering`` a gradient."""
    runs: list[int] = []

    def note_run(*_: Any) -> None:
        runs.append(1)

    next(iter(layers.children())).register_forward_hook(note_run)
    found = fn(comm, layers, inputs)
    many = isinstance(found, Iterable) and not isinstance(found, Tensor)
    pair = tuple(itertools.islice(found, 3)) if many else ()
    if len(pair) != 2 or not all(isinstance(one, Tensor) for one in pair):
        return Wrong("the function has to return a pair of tensors, (entering, leaving)")
    entering, leaving = pair
    rank = comm.rank
    wrong = _other_values("entering", entering, _after(rank, case), rank, case)
    wrong = wrong or _other_values("leaving", leaving, _after(rank + 1, case), rank, case)
    if wrong:
        return Wrong(wrong)
    if len(runs) > 1:
        return Wrong(f"the layers ran {len(runs)} times, expected once")
    if not leaving.requires_grad:
        return Wrong("leaving has no graph behind it, so no gradient can go back through it")
    leaving.sum().backward()
    if any(parameter.grad is None for parameter in layers.parameters()):
        return Wrong("leaving does not come from the layers: their parameters get no gradient")
    if rank == 0 or (entering.is_leaf and entering.grad is not None):
        return None
    return Wrong(
        "entering gets no gradient: it has to be the received tensor itself, with "
        "requires_grad_(), from which the layers have made leaving"
    )


def _other_values(name: str, found: Tensor, expected: Tensor, rank: int, case: Case) -> Found:
    if kind := other_kind(found.detach(), expected):
        return f"{name}: {kind}"
    if same(found.detach(), expected):
        return None
    with torch.no_grad():
        looks = {
            f"the output of stage {rank}": _after(rank + 1, case),
            "the input of this stage": _after(rank, case),
            "the given inputs, which only stage 0 uses": _given(rank, case),
            "what the layers make of the given inputs": _stage(rank)(_given(rank, case)),
        }
        if rank:
            looks[f"the input of stage {rank - 1}"] = _after(rank - 1, case)
    like = [words for words, one in looks.items() if same(found.detach(), one)]
    stage = rank if name == "leaving" else rank - 1
    wanted = f"the output of stage {stage}" if stage >= 0 else "inputs"
    return f"{name} is {like[0] if like else 'another tensor'}, not {wanted}"


def _ran(rank: int, case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    """A stage after its forward: layers, input, output (on the last stage the loss)."""
    layers, entering = _stage(rank), _after(rank, case).requires_grad_(rank > 0)
    leaving = layers(entering)
    if rank == case.world_size - 1:
        leaving = leaving.square().mean()
    return layers, entering, leaving
