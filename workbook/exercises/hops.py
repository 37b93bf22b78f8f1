"""The checks of page 08 with ranks: a stage's forward with its hops, and its backward.

Symbols: P ranks and stages, n samples. The input and the output of every stage are [n, 4], so that
a wrong tensor can be received, too, and the mistake can be named.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.comm.comm import Comm
from workbook.exercises.grader import WORLD_SIZES, Case, Mistake, Target, Verdict, returns
from workbook.exercises.grader.compare import other_kind, same
from workbook.exercises.grader.exercise import with_parameters

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
        judge=_judge_forward,
        target=partial(_target, 1),
        drawn_size=_DRAWN,
        world_sizes=world_sizes,
    )


def backward(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, entering, leaving)``, the backward of one stage, with its hops.

    On the last stage ``leaving`` is the loss; on any other it is [n, 4], and the next stage sends
    its gradient. At the end all parameters must have the gradient that they have on one device.
    """
    return returns(
        fn,
        _gradients_alone,
        name="hops.backward",
        signature="comm, entering, leaving",
        inputs=lambda rank, case: (case,),
        call=_gradients_of,
        mistakes={id: partial(_gradients_alone, **by) for id, by in _BACKWARD_MISTAKES.items()},
        target=partial(_target, -1),
        drawn_size=_DRAWN,
        world_sizes=world_sizes,
    )


def _stage(rank: int) -> nn.Module:
    layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh())
    return with_parameters(layers, 11 + rank)


def _samples(case: Case) -> int:
    return case.size or _SAMPLES


def _inputs(case: Case) -> Tensor:
    return case.random(3, _samples(case), _WIDTH)


def _given(rank: int, case: Case) -> Tensor:
    """The ``inputs`` of a rank: other values on each, as only those of stage 0 count."""
    return _inputs(case) if rank == 0 else case.random(30 + rank, _samples(case), _WIDTH)


def _target(step: int, rank: int, case: Case) -> Target:
    """One message to stage rank + ``step``, if it exists; one call of comm per neighbour."""
    peer, calls = rank + step, (rank > 0) + (rank < case.world_size - 1)
    if not 0 <= peer < case.world_size:
        return Target(0, 0, calls, frozenset())
    return Target(1, 4 * _samples(case) * _WIDTH, calls, frozenset([peer]))


# Forward


def _look_at_forward(
    fn: Callable, comm: Comm, layers: nn.Module, inputs: Tensor, case: Case
) -> list[Mistake] | Mistake:
    """On the rank: call ``fn``, and test whether backward would give ``entering`` a gradient."""
    runs: Counter[nn.Module] = Counter()
    for layer in layers.children():
        layer.register_forward_hook(lambda layer, *_: runs.update([layer]))
    pair = _pair(fn(comm, layers, inputs))
    if pair is None:
        return Mistake("hops.no_pair")
    wrong = _wrong_values(comm.rank, case, *pair)
    wrong = wrong or _wrong_graph(comm.rank, *pair, layers, max(runs.values(), default=0))
    return [wrong] if wrong else []


def _pair(found: Any) -> tuple[Tensor, Tensor] | None:
    """Two tensors from a tuple, a list, a generator ...; None if there are not two."""
    if isinstance(found, Tensor) or not isinstance(found, Iterable):
        return None
    tensors = tuple(itertools.islice(found, 3))
    if len(tensors) != 2 or not all(isinstance(one, Tensor) for one in tensors):
        return None
    return tensors


def _judge_forward(case: Case, by_rank: list[list[Mistake]]) -> Mistake | None:
    for rank, wrong in enumerate(by_rank):
        if wrong:
            return Mistake("hops.rank", wrong[0], rank=rank)
    return None


@torch.no_grad()
def _after(num_stages: int, case: Case) -> Tensor:
    """The output of the first ``num_stages`` stages, [n, 4]."""
    value = _inputs(case)
    for rank in range(num_stages):
        value = _stage(rank)(value)
    return value


def _wrong_values(rank: int, case: Case, entering: Tensor, leaving: Tensor) -> Mistake | None:
    for name, found, due, wrong in (
        ("entering", entering.detach(), _after(rank, case), _wrong_entering),
        ("leaving", leaving.detach(), _after(rank + 1, case), _wrong_leaving),
    ):
        if kind := other_kind(found, due):
            return Mistake("hops.kind", name=name, **kind.details)
        if not same(found, due):
            return wrong(rank, case, found)
    return None


def _wrong_leaving(rank: int, case: Case, found: Tensor) -> Mistake:
    with torch.no_grad():
        on_inputs = _stage(rank)(_given(rank, case))
    if same(found, on_inputs):
        return Mistake("hops.ran_on_inputs")
    return Mistake("hops.not_run" if same(found, _after(rank, case)) else "hops.other_output")


def _wrong_entering(rank: int, case: Case, found: Tensor) -> Mistake:
    if same(found, _given(rank, case)):
        return Mistake("hops.returned_inputs")
    if same(found, _after(rank - 1, case)):
        return Mistake("hops.sent_what_entered", before=rank - 1)
    if same(found, _after(rank + 1, case)):
        return Mistake("hops.swapped")
    return Mistake("hops.other_input")


def _wrong_graph(
    rank: int, entering: Tensor, leaving: Tensor, layers: nn.Module, runs: int
) -> Mistake | None:
    if runs > 1:
        return Mistake("hops.runs", runs=runs)
    if not leaving.requires_grad:
        return Mistake("hops.no_graph")
    leaving.sum().backward()
    if any(parameter.grad is None for parameter in layers.parameters()):
        return Mistake("hops.runs", runs=0)
    if rank == 0 or (entering.is_leaf and entering.grad is not None):
        return None
    if not entering.requires_grad:
        return Mistake("hops.no_requires_grad")
    return Mistake("hops.gets_nothing" if entering.is_leaf else "hops.no_leaf")


# Backward


Gradient = Tensor | None


def _ran(rank: int, case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    """A stage after its forward: layers, input, output (on the last stage the loss)."""
    layers, entering = _stage(rank), _after(rank, case).requires_grad_(rank > 0)
    leaving = layers(entering)
    if rank == case.world_size - 1:
        leaving = leaving.square().mean()
    return layers, entering, leaving


def _gradients_of(fn: Callable, comm: Comm, case: Case) -> list[Gradient] | Mistake:
    """On the rank: the gradients that ``fn`` leaves, by parameter."""
    layers, entering, leaving = _ran(comm.rank, case)
    fn(comm, entering, leaving)
    found = [parameter.grad for parameter in layers.parameters()]
    if any(gradient is None for gradient in found):
        return Mistake("hops.no_gradients")
    return found


def _gradients_alone(
    rank: int,
    case: Case,
    begin: Callable = lambda leaving, g: g,
    pass_on: Callable = lambda entering, g, P: entering.grad,
) -> list[Gradient]:
    """The gradients of one stage, by parameter, in one process; each option is for a mistake.

    Args:
        rank: the stage.
        case: P, the number of stages.
        begin: (leaving, the received gradient) -> the gradient with which backward starts.
        pass_on: (entering, the received gradient, P) -> what is sent to the stage before.
    """
    layers, came = nn.Module(), None
    for stage in reversed(range(rank, case.world_size)):
        layers, entering, leaving = _ran(stage, case)
        leaving.backward(begin(leaving, came))
        came = pass_on(entering, came, case.world_size) if stage else None
    return [parameter.grad for parameter in layers.parameters()]


_BACKWARD_MISTAKES: dict[str, dict[str, Callable]] = {
    "hops.began_with_ones": {"begin": lambda leaving, g: torch.ones_like(leaving)},
    "hops.passed_on": {"pass_on": lambda entering, g, P: entering.grad if g is None else g},
    "hops.activation_back": {"pass_on": lambda entering, g, P: entering.detach()},
    "hops.added": {"pass_on": lambda entering, g, P: entering.grad + (0 if g is None else g)},
    "hops.averaged": {"pass_on": lambda entering, g, P: entering.grad / P},
    "hops.twice": {"begin": lambda leaving, g: torch.full((), 2.0) if g is None else 2 * g},
    "hops.zeros": {"pass_on": lambda entering, g, P: torch.zeros_like(entering)},
}
