"""Page 08, with ranks: a stage's forward with its hops, its backward, and branches.

Symbols: P ranks and stages, n samples. The input and the output of every stage are [n, 4], so that
a wrong tensor can be received, too, and told from the right one.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.engine.comm.comm import Comm
from labkit.workload.layers import EmulatedLayer
from workbook.exercises.grader import Case, Check, Target, Wrong
from workbook.exercises.grader.exercise import with_parameters

_SAMPLES = 5
_WIDTH = 4


def _stages(count: int) -> nn.Sequential:
    return nn.Sequential(*map(_stage, range(count)))


def _stage(rank: int) -> nn.Sequential:
    return with_parameters(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()), 11 + rank)


def _given(rank: int, case: Case) -> Tensor:
    """The ``inputs`` of a rank: other values on each, as only those of stage 0 count."""
    return case.random(30 + rank, case.size or _SAMPLES, _WIDTH)


def _after(num_stages: int, case: Case) -> Tensor:
    return _stages(num_stages)(_given(0, case)).detach()


def _parts(case: Case) -> dict[str, Tensor]:
    parts = {}
    for rank in range(case.world_size):
        parts[f"the inputs of rank {rank}"] = _given(rank, case)
        parts[f"the output of stage {rank}"] = _after(rank + 1, case)
    return parts


def _target(step: int, rank: int, case: Case) -> Target:
    """One message to stage rank + ``step``, if it exists; one call of comm per neighbor."""
    peer = rank + step
    calls = (rank > 0) + (rank < case.world_size - 1)
    if not 0 <= peer < case.world_size:
        return Target(0, 0, calls, frozenset())
    return Target(1, 4 * (case.size or _SAMPLES) * _WIDTH, calls, frozenset([peer]))


def _forward(
    fn: Callable, comm: Comm, layers: nn.Sequential, inputs: Tensor
) -> tuple[Tensor, Tensor] | Wrong:
    runs = list[int]()
    layers[0].register_forward_hook(lambda *_: runs.append(1))
    returned = fn(comm, layers, inputs)
    pair = [*itertools.islice(returned, 3)] if isinstance(returned, Iterable) else []
    if len(pair) != 2 or not all(isinstance(value, Tensor) for value in pair):
        return Wrong("the function has to return a pair of tensors, (entering, leaving)")
    entering, leaving = pair
    if len(runs) > 1:
        return Wrong(f"the layers ran {len(runs)} times, expected once")
    with contextlib.suppress(RuntimeError):  # there is no graph, or it has been used up
        leaving.sum().backward()
    if any(parameter.grad is None for parameter in layers.parameters()):
        return Wrong("a backward from leaving gives the parameters of the layers no gradient")
    if comm.rank and not (entering.is_leaf and entering.grad is not None):
        advice = "call its requires_grad_(), and give it to the layers"
        if not entering.is_leaf:
            advice = "it is not a leaf, so requires_grad_() comes after clone()"
        return Wrong(f"entering, the received tensor, gets no gradient from a backward: {advice}")
    return entering, leaving


def _backward(fn: Callable, comm: Comm, case: Case) -> list[Tensor | None]:
    stages = _stages(comm.world_size)
    layers = stages[comm.rank]
    entering = stages[: comm.rank](_given(0, case)).detach().requires_grad_(comm.rank > 0)
    leaving = layers(entering)
    if comm.rank == comm.world_size - 1:
        leaving = leaving.square().mean()
    fn(comm, entering, leaving)
    return [parameter.grad for parameter in layers.parameters()]


def _gradients(rank: int, case: Case, sends_what_came: bool = False) -> list[Tensor | None]:
    """The gradients of a stage on one device, or where each stage sends on what came."""
    stages = _stages(case.world_size)
    tensors = [_given(0, case)]
    for stage in stages:
        tensors.append(stage(tensors[-1]))
    loss = tensors[-1].square().mean()
    if sends_what_came and rank < case.world_size - 1:
        (gradient,) = torch.autograd.grad(loss, tensors[-2], retain_graph=True)
        tensors[rank + 1].backward(gradient)
    else:
        loss.backward()
    return [parameter.grad for parameter in stages[rank].parameters()]


# So many samples are drawn that messages and computing can be seen.
_check = partial(Check, written=None, sizes=(), inputs=lambda _, case: (case,), drawn_size=50_000)
# (entering, leaving): a stage's input and output, with autograd's graph between the two.
forward = _check(
    "hops.forward",
    lambda rank, case: [_after(rank, case), _after(rank + 1, case)],
    signature="comm, layers, inputs",
    keeps=("inputs",),
    inputs=lambda rank, case: (_stage(rank), _given(rank, case)),
    call=_forward,
    parts=_parts,
    target=partial(_target, 1),
)
# On the last stage ``leaving`` is the loss. All parameters get the gradients of one device.
backward = _check(
    "hops.backward",
    _gradients,
    signature="comm, entering, leaving",
    call=_backward,
    target=partial(_target, -1),
    mistakes={
        "a stage sends on the gradient of what entered it, not the one that it received": (
            partial(_gradients, sends_what_came=True)
        ),
    },
)


def _network(P: int) -> tuple[list[nn.Sequential], nn.Sequential]:
    """P towers and the head."""
    head = with_parameters(nn.Sequential(nn.Linear(_WIDTH, _WIDTH)), 71)
    return [_stage(tower).append(EmulatedLayer(0.0, 0.002)) for tower in range(P)], head


def _batch(case: Case) -> tuple[Tensor, Tensor]:
    n = case.size or _SAMPLES
    return case.random(41, n, _WIDTH), torch.arange(n) % _WIDTH


def _branch_gradients(rank: int, case: Case) -> list[Tensor | None]:
    """The gradients of a tower, and on rank 0 of the head, on one device."""
    towers, head = _network(case.world_size)
    inputs, targets = _batch(case)
    joined = torch.stack([tower(inputs) for tower in towers]).sum(0)
    functional.cross_entropy(head(joined), targets).backward()
    return _gradients_on(rank, towers[rank], head)


def _gradients_on(rank: int, tower: nn.Module, head: nn.Module) -> list[Tensor | None]:
    parameters = list(tower.parameters())
    if rank == 0:
        parameters += head.parameters()
    return [parameter.grad for parameter in parameters]


def _branches(fn: Callable, comm: Comm, case: Case) -> list[Any]:
    """The gradients on a rank, and a sentence on tower 0 where the others wait for it."""
    towers, head = _network(comm.world_size)
    tower = towers[comm.rank]
    calls_before = list[int]()  # before the tower's forward, and before its backward
    start = comm.operations

    def watch(module: nn.Module, args: tuple, output: Tensor) -> None:
        calls_before.append(comm.operations - start)
        output.register_hook(lambda gradient: calls_before.append(comm.operations - start))

    tower.register_forward_hook(watch)
    fn(comm, tower, None if comm.rank else head, *_batch(case))
    calls = comm.operations - start
    # Forward before all calls, backward after them: the towers run at the same time.
    late = None
    if len(calls_before) == 2 and comm.rank == 0 and calls_before != [0, calls]:
        forward, backward = calls_before
        late = f"tower 0 goes forward after {forward} and backward after {backward} of rank 0's"
        late += f" {calls} calls of comm, expected 0 and {calls}: the other towers wait for it"
    return [*_gradients_on(comm.rank, tower, head), late]


def _branch_target(rank: int, case: Case) -> Target:
    """One message per tower and direction, between its rank and rank 0."""
    peers = frozenset(range(1, case.world_size)) if rank == 0 else frozenset([0])
    size = 4 * (case.size or _SAMPLES) * _WIDTH
    return Target(len(peers), len(peers) * size, 2 * len(peers), peers)


# The loss is cross_entropy(head(the sum of all towers' outputs), targets).
branches = _check(
    "hops.branches",
    lambda rank, case: [*_branch_gradients(rank, case), None],
    signature="comm, tower, head, inputs, targets",
    call=_branches,
    rule=lambda case, ranks: ranks[0].value[-1],
    target=_branch_target,
)
