"""An overlapping backward on a rank: what ``check.overlap.backward`` runs and records.

Symbols: P ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.collectives import ring_all_reduce
from labkit.comm.comm import Comm
from labkit.comm.tensors import check_tensor
from labkit.comm.work import WorkQueue
from workbook.exercises.grader import Case, Mistake
from workbook.exercises.grader.exercise import random_tensor
from workbook.exercises.grader.limits import OutOfTime, limited_time

# A step of the learner's function takes milliseconds.
_MOST_S = 2.0
# Samples of the global batch: with so many every rank uses every parameter, or some do not.
ALL_USED, SOME_UNUSED = 11, 7
_FEATURES, _HIDDEN, _CLASSES = 4, 6, 3
# In the order of registration: both layers of the trunk, two branches, one that rank 0 alone uses,
# one that nobody uses, the last layer.
SHAPES = ((6, 4), (6,), (6, 6), (6, 6, 2), (5,), (2,), (3, 6), (3,))
BUCKETS = ((7, 6), (5, 3), (4, 2), (1, 0))
_SIZES = [torch.Size(shape).numel() for shape in SHAPES]
# No two buckets have equally many elements, so a start tells which bucket it is.
BUCKET_OF_SIZE = {sum(_SIZES[i] for i in bucket): b for b, bucket in enumerate(BUCKETS)}


class Step(NamedTuple):
    """One call of the learner's function on a rank.

    Attributes:
        ready: the parameters in the order in which they got their gradients.
        starts: (elements, how many gradients were ready) of each start.
        waits: how many gradients were ready at the first wait for each start; None: no wait.
        gradients: by parameter, at the end.
        hooks: how many the function has left on the parameters.
    """

    ready: list[int]
    starts: list[tuple[int, int]]
    waits: list[int | None]
    gradients: list[Tensor | None]
    hooks: int


@dataclass(frozen=True)
class Steps:
    """What a rank returns."""

    steps: list[Step] = field(default_factory=list)


class _Started:
    """An all-reduce that another thread carries out; the sum is delivered by ``wait``."""

    def __init__(self, flat: Tensor, note_wait: Callable[[], None]):
        self._flat, self._note_wait = flat, note_wait
        self.values = flat.detach().flatten().clone()
        self.work: Any = None
        self._delivered = False

    def wait(self, *_: Any) -> bool:
        self._note_wait()
        self.work.wait()
        if not self._delivered:
            with torch.no_grad():
                self._flat.copy_(self.values.view_as(self._flat))
        self._delivered = True
        return True


class _Watch:
    """What happens in a step on a rank, and the all-reduces that it starts.

    Before the values travel, the ranks tell each other how many there are. Where they disagree
    (other orders, fewer starts) nothing travels, so a wrong answer cannot hang or mix its sums.
    """

    def __init__(self, comm: Comm, parameters: list[nn.Parameter]):
        self._device = comm.device
        self._queue = WorkQueue("labkit-check", comm)
        self.begin()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: self.ready.append(i))
            for i, parameter in enumerate(parameters)
        ]

    def begin(self) -> None:
        """Forget the step before."""
        self.ready: list[int] = []
        self.starts: list[tuple[int, int]] = []
        self.waits: list[int | None] = []

    def start(self, flat: Tensor) -> _Started:
        check_tensor(flat, self._device)
        number = len(self.starts)
        self.starts.append((flat.numel(), len(self.ready)))
        self.waits.append(None)
        started = _Started(flat, partial(self._note_wait, number))
        started.work = self._add(lambda comm: self._round(comm, started.values))
        return started

    def until_all_end(self) -> None:
        """Take part in the rounds of other ranks until all have come to the end of the step."""

        def rounds(comm: Comm) -> None:
            while self._round(comm, None):
                pass

        self._add(rounds).wait()

    def close(self) -> None:
        self._queue.end()
        for hook in self._hooks:
            hook.remove()

    def _note_wait(self, number: int) -> None:
        if self.waits[number] is None:
            self.waits[number] = len(self.ready)

    def _add(self, operation: Callable[[Comm], object]) -> Any:
        return self._queue.add("all_reduce", operation, [], [])

    @staticmethod
    def _round(comm: Comm, values: Tensor | None) -> bool:
        """Add up the ranks' values if they are equally many; whether any rank has some."""
        counts = torch.zeros(comm.world_size)
        counts[comm.rank] = 0 if values is None else values.numel() + 1
        ring_all_reduce(comm, counts)
        if values is not None and (counts == counts[0]).all():
            ring_all_reduce(comm, values)
        return bool(counts.any())


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(random_tensor(30 + i, *s) / 2) for i, s in enumerate(SHAPES)]


def _loss(parameters: list[nn.Parameter], rank: int, case: Case, step: int) -> Tensor:
    """The sum of the losses of a rank's share, which may be empty."""
    trunk, bias, left, right, rare, never, last, last_bias = parameters
    inputs = case.random(11 + step, case.size, _FEATURES).tensor_split(case.world_size)[rank]
    targets = torch.arange(case.size).tensor_split(case.world_size)[rank] % _CLASSES
    hidden = torch.tanh(inputs @ trunk.T + bias)
    # Backward goes through the branch that was taken last first: ranks differ in their orders.
    branches = [lambda: hidden @ left.T, lambda: (hidden @ right.sum(2).T).sin()]
    first, second = branches if rank % 2 == 0 else reversed(branches)
    out = first() + second()
    if case.size == ALL_USED or rank == 0:
        out = out * rare.exp().sum()
    if case.size == ALL_USED:
        out = out + never.sum()
    scores = out @ last.T + last_bias
    return functional.cross_entropy(scores, targets, reduction="sum")


def two_steps(fn: Callable, comm: Comm, case: Case) -> Steps | Mistake:
    """On a rank: two calls of the learner's function, with one model."""
    if case.call:
        # The second step has shown already what the function keeps from one call to the next.
        return Steps()
    parameters, steps = _parameters(), []
    watch = _Watch(comm, parameters)
    try:
        for number in range(2):
            watch.begin()
            done = _one_step(
                fn, watch, parameters, _loss(parameters, comm.rank, case, number), case
            )
            if isinstance(done, Mistake):
                return done
            steps.append(done)
    finally:
        watch.close()
    return Steps(steps)


def _one_step(
    fn: Callable, watch: _Watch, parameters: list[nn.Parameter], loss: Tensor, case: Case
) -> Step | Mistake:
    for parameter in parameters:
        parameter.grad = None
    before = [parameter.detach().clone() for parameter in parameters]
    num_hooks = _num_hooks(parameters)
    try:
        with limited_time(_MOST_S):
            fn(loss, list(parameters), [list(b) for b in BUCKETS], watch.start, case.size)
    except OutOfTime:
        absent = [i for i in range(len(parameters)) if i not in watch.ready]
        return Mistake("overlap.endless", seconds=_MOST_S, indices=absent or "none")
    finally:
        watch.until_all_end()
    if not all(torch.equal(p, kept) for p, kept in zip(parameters, before)):
        return Mistake("gradient.updated")
    found = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
    left = _num_hooks(parameters) - num_hooks
    return Step(watch.ready, watch.starts, watch.waits, found, left)


def _num_hooks(parameters: list[nn.Parameter]) -> int:
    """How many hooks are on the parameters: PyTorch has no public way to ask."""
    kinds = "_post_accumulate_grad_hooks", "_backward_hooks"
    return sum(len(getattr(p, kind, None) or ()) for p in parameters for kind in kinds)


def own_gradients(rank: int, case: Case, step: int) -> list[Tensor]:
    parameters = _parameters()
    loss = _loss(parameters, rank, case, step)
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)]
