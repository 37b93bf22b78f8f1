"""Page 08, with ranks: a stage's forward with its hops, and its backward.

Symbols: P ranks and stages, n samples. The input and the output of every stage are [n, 4], so that
a wrong tensor can be received, too, and told from the right one.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from functools import partial

from torch import Tensor, nn

from labkit.comm.comm import Comm
from workbook.exercises.grader import WORLD_SIZES, Case, Target, Verdict, Wrong, returns
from workbook.exercises.grader.exercise import with_parameters

_SAMPLES, _WIDTH = 5, 4
# Samples in a run that is drawn, so that its messages and its computing can be seen.
_DRAWN = 50_000


def forward(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, layers, inputs)``, the forward of one stage, with its hops.

    Returned are the stage's input and output, ``(entering, leaving)``, with autograd's graph
    between the two; on all stages but the first ``entering`` can get a gradient.
    """

    def call(
        fn: Callable, comm: Comm, layers: nn.Sequential, inputs: Tensor
    ) -> tuple[Tensor, Tensor] | Wrong:
        runs = list[int]()
        layers[0].register_forward_hook(lambda *_: runs.append(1))
        found = fn(comm, layers, inputs)
        pair = [*itertools.islice(found, 3)] if isinstance(found, Iterable) else []
        if len(pair) != 2 or not all(isinstance(one, Tensor) for one in pair):
            return Wrong("the function has to return a pair of tensors, (entering, leaving)")
        entering, leaving = pair
        if len(runs) > 1:
            return Wrong(f"the layers ran {len(runs)} times, expected once")
        with contextlib.suppress(RuntimeError):  # there is no graph, or it has been used up
            leaving.sum().backward()
        if any(parameter.grad is None for parameter in layers.parameters()):
            why = "a backward from leaving gives the parameters of the layers no gradient"
            return Wrong(f"{why}: it has to be their output, with its graph")
        if comm.rank and not (entering.is_leaf and entering.grad is not None):
            why = "entering gets no gradient: it has to be the received tensor itself, with "
            return Wrong(f"{why}requires_grad_(), from which the layers have made leaving")
        return entering, leaving

    def after(num_stages: int, case: Case) -> Tensor:
        """The output of the first ``num_stages`` stages, [n, 4]."""
        return _stages(num_stages)(_given(0, case)).detach()

    def parts(case: Case) -> dict[str, Tensor]:
        stages = range(case.world_size)
        made = {f"the output of stage {rank}": after(rank + 1, case) for rank in stages}
        return made | {f"inputs on rank {rank}": _given(rank, case) for rank in stages}

    return returns(
        fn,
        lambda rank, case: [after(rank, case), after(rank + 1, case)],
        name="hops.forward",
        signature="comm, layers, inputs",
        inputs=lambda rank, case: (_stage(rank), _given(rank, case)),
        call=call,
        parts=parts,
        target=partial(_target, 1),
        drawn_size=_DRAWN,
        world_sizes=world_sizes,
    )


def backward(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(comm, entering, leaving)``, the backward of one stage, with its hops.

    On the last stage ``leaving`` is the loss. At the end all parameters must have the gradient
    that they have on one device.
    """

    def ran(rank: int, case: Case) -> tuple[nn.Module, Tensor, Tensor]:
        """A stage after its forward: layers, input, output (on the last stage the loss)."""
        layers = _stages(case.world_size)
        entering = layers[:rank](_given(0, case)).detach().requires_grad_(rank > 0)
        leaving = layers[rank](entering)
        is_last = rank == case.world_size - 1
        return layers[rank], entering, leaving.square().mean() if is_last else leaving

    def call(fn: Callable, comm: Comm, case: Case) -> list[Tensor | None]:
        layers, entering, leaving = ran(comm.rank, case)
        fn(comm, entering, leaving)
        return [parameter.grad for parameter in layers.parameters()]

    def alone(rank: int, case: Case) -> list[Tensor | None]:
        layers = _stages(case.world_size)
        layers(_given(0, case)).square().mean().backward()
        return [parameter.grad for parameter in layers[rank].parameters()]

    def from_ones(rank: int, case: Case) -> list[Tensor | None]:
        layers, _, leaving = ran(rank, case)
        leaving.sum().backward()
        return [parameter.grad for parameter in layers.parameters()]

    return returns(
        fn,
        alone,
        name="hops.backward",
        signature="comm, entering, leaving",
        inputs=lambda rank, case: (case,),
        call=call,
        mistakes={"backward began with ones, and not with the gradient that came": from_ones},
        target=partial(_target, -1),
        drawn_size=_DRAWN,
        world_sizes=world_sizes,
    )


def _stage(rank: int) -> nn.Sequential:
    return with_parameters(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()), 11 + rank)


def _stages(count: int) -> nn.Sequential:
    return nn.Sequential(*map(_stage, range(count)))


def _given(rank: int, case: Case) -> Tensor:
    """The ``inputs`` of a rank: other values on each, as only those of stage 0 count."""
    return case.random(30 + rank, case.size or _SAMPLES, _WIDTH)


def _target(step: int, rank: int, case: Case) -> Target:
    """One message to stage rank + ``step``, if it exists; one call of comm per neighbour."""
    peer, calls = rank + step, (rank > 0) + (rank < case.world_size - 1)
    if not 0 <= peer < case.world_size:
        return Target(0, 0, calls, frozenset())
    return Target(1, 4 * (case.size or _SAMPLES) * _WIDTH, calls, frozenset([peer]))
