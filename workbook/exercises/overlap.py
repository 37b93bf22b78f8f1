"""Page 03: communication that goes on beside backward.

``in_order`` is a piece of ``backward``. No check looks at a clock:
an all-reduce overlaps if it was started before the last gradient was there, and waited for after
it. Symbols: P ranks, B samples in the global batch.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.collectives import fast_ring_all_reduce
from labkit.engine.comm.comm import Comm
from labkit.engine.comm.emulated_link import EmulatedLink
from labkit.engine.comm.transport import check_tensor
from labkit.engine.comm.work import work_queue_of
from labkit.schedules.bucket_assignment import MIB, assign_buckets
from workbook.exercises.ddp import gradients_left
from workbook.exercises.grader import Case, Check, Wrong, judged
from workbook.exercises.grader.compare import agree, plain, short
from workbook.exercises.grader.exercise import Found, random_tensor

# Buckets, and by rank the order in which the gradients get ready; one may never get ready.
_ORDERS = (
    ([[5, 4], [3], [2, 1], [0]], [[5, 4, 3, 2, 1, 0], [3, 5, 2, 4, 1, 0], [2, 1, 3, 0, 4, 5]]),
    ([[4, 3], [2, 1, 0]], [[4, 3, 2, 1, 0], [2, 1, 4, 0, 3]]),
    ([[3], [2], [1], [0]], [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]]),
    ([[2], [1], [0]], [[2, 1, 0], [2, 0], [1, 0]]),
)


@judged("buckets, start", *((buckets, order) for buckets, orders in _ORDERS for order in orders))
def in_order(fn: Callable, buckets: list[list[int]], order: list[int]) -> Wrong | None:
    """Grade ``fn(buckets, start)``, which returns ``ready(index)``: full buckets leave in order.

    ``start(b)`` has to be called as soon as buckets 0 to b have all their gradients.
    """
    starts = []
    num_ready = 0
    given = [list(bucket) for bucket in buckets]
    ready = fn(given, lambda b: starts.append([plain(b), num_ready]))
    if not callable(ready):
        return Wrong(f"the function returned {short(ready)}: return a function ready(index)")
    for index in order:
        num_ready += 1
        ready(index)
    if given != buckets:
        return Wrong("the lists in buckets were changed: the next backward needs them as well")
    expected = list(map(list, enumerate(_start_moments(buckets, order))))
    if agree(starts, expected):
        return None
    text = f"the starts, each with the number of gradients that are there, are {starts}"
    text += f", expected {expected}"
    started = [b for b, _ in starts]
    in_turn = [b for b, _ in expected]
    if sorted(map(str, started)) != sorted(set(map(str, started))):
        text += "\na bucket is started more than once"
    elif started != in_turn and sorted(map(str, started)) == sorted(map(str, in_turn)):
        text += "\na bucket that is full waits for those before it"
    elif started == in_turn[: len(started)] and starts[-1:] > expected[len(starts) - 1 :][:1]:
        text += "\nwith one gradient several buckets may have to start"
    return Wrong(text)


def _start_moments(buckets: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """The number of gradients there when a bucket may start, by bucket; of the first ones only.

    A bucket may start with its last gradient, and not before the buckets before it. One whose
    gradients are never all there has no entry, nor have those after it.
    """
    moments = []
    for bucket in buckets:
        if not set(bucket) <= set(order):
            break
        moments.append(1 + max(map(order.index, bucket)))
    return list(accumulate(moments, max))


class _AllReduce:
    """Stands for an all-reduce under way, whose sum is there once it is waited for.

    Attributes:
        local: the tensor that this rank has put into it.
        started_at, waited_at: the number of gradients that had come.
    """

    def __init__(self, flat: Tensor, remote: Sequence[Tensor], came: Sequence[int] = ()):
        check_tensor(flat, torch.device("cpu"))
        self.local = flat.detach().flatten().clone()
        self.started_at = len(came)
        self.waited_at: int | None = None
        self._flat = flat
        self._remote = remote
        self._came = came

    def wait(self, *_: Any) -> bool:
        if self.waited_at is None:
            self.waited_at = len(self._came)
            # A rank that sends another number of elements is told so, by itself.
            alike = [tensor for tensor in self._remote if tensor.shape == self.local.shape]
            with torch.no_grad():
                self._flat.copy_(torch.stack([self.local, *alike]).sum(0).view_as(self._flat))
        return True


# In the order of registration: both layers of the trunk, two branches, one that rank 0 alone uses,
# one that nobody uses, the last layer.
_SHAPES = ((6, 4), (6,), (6, 6), (6, 6, 2), (5,), (2,), (3, 6), (3,))
_BUCKETS = [[7, 6], [5, 3], [4, 2], [1, 0]]


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(random_tensor(30 + i, *s) / 2) for i, s in enumerate(_SHAPES)]


def _flat(tensors: Sequence[Tensor], bucket: Sequence[int]) -> Tensor:
    return torch.cat([tensors[index].flatten() for index in bucket])


def _left(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """The gradients of the parameters; zeros where there is none."""
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]


# Samples of the global batch: with the second number some parameters are not used. As many a rank
# are drawn, through layers whose backward takes about as long as their gradients on the link.
_ALL_USED = 11
_SOME_UNUSED = 7
_DRAWN = 256
_WIDTH = 512
_LAYERS = 6
_LINK = EmulatedLink(0.001, 125e6)
_FEATURES = 4
_CLASSES = 3
# No two buckets have equally many elements, so a start tells which bucket it is.
_ELEMENTS = [sum(torch.Size(_SHAPES[i]).numel() for i in bucket) for bucket in _BUCKETS]


def _loss(parameters: list[nn.Parameter], rank: int, case: Case) -> Tensor:
    """The sum of the losses of a rank's share, which may be empty."""
    trunk, bias, left, right, rare, never, last, last_bias = parameters
    inputs = case.random(11, case.size, _FEATURES).tensor_split(case.world_size)[rank]
    targets = torch.arange(case.size).tensor_split(case.world_size)[rank] % _CLASSES
    hidden = torch.tanh(inputs @ trunk.T + bias)
    # Backward goes through the branch that was taken last first: ranks differ in their orders.
    branches = [lambda: hidden @ left.T, lambda: (hidden @ right.sum(2).T).sin()]
    first, second = branches if rank % 2 == 0 else reversed(branches)
    out = first() + second()
    if case.size != _SOME_UNUSED or rank == 0:
        out = out * rare.exp().sum()
    if case.size != _SOME_UNUSED:
        out = out + never.sum()
    return functional.cross_entropy(out @ last.T + last_bias, targets, reduction="sum")


def _gradients(rank: int, case: Case) -> tuple[Tensor, ...]:
    """Gradients of the sum over a rank's samples, by parameter; zeros where it uses none."""
    parameters = _parameters()
    loss = _loss(parameters, rank, case)
    return torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)


def _one_step(fn: Callable, comm: Comm, case: Case) -> Tensor | Wrong:
    """Call the learner's function on a rank; all gradients in one row.

    Each rank plays the others, too, to know what they put into their all-reduces.
    """
    if case.size == _DRAWN:
        return _drawn_step(fn, comm)
    peers = [rank for rank in range(case.world_size) if rank != comm.rank]
    remote_starts = [_played(fn, rank, case)[2] for rank in peers]
    parameters, came, starts, hooks = _played(fn, comm.rank, case, remote_starts)
    if wrong := _wrong_moments(came, starts):
        return Wrong(wrong)
    if hooks:
        return Wrong(f"{hooks} hooks are still on the parameters: remove them after backward")
    return gradients_left(parameters, _parameters())


def _played(
    fn: Callable, rank: int, case: Case, remote_starts: Sequence[list[_AllReduce]] = ()
) -> tuple[list[nn.Parameter], list[int], list[_AllReduce], int]:
    """The parameters, the gradients in their order, the all-reduces, the hooks left behind."""
    parameters = _parameters()
    came: list[int] = []
    starts: list[_AllReduce] = []
    for i, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: came.append(i))
    hooks_before = sum(map(_num_hooks, parameters))

    def start(flat: Tensor) -> _AllReduce:
        b = len(starts)
        remote = [of_rank[b].local for of_rank in remote_starts if b < len(of_rank)]
        starts.append(_AllReduce(flat, remote, came))
        return starts[-1]

    loss = _loss(parameters, rank, case)
    fn(loss, list(parameters), [list(bucket) for bucket in _BUCKETS], start, case.size)
    return parameters, came, starts, sum(map(_num_hooks, parameters)) - hooks_before


def _num_hooks(parameter: Tensor) -> int:
    """PyTorch has no public way to ask."""
    hooks = [*(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())]
    return len(hooks) + len(parameter._backward_hooks or ())


def _wrong_moments(came: list[int], starts: list[_AllReduce]) -> Found:
    """The fault in the moments of starts and waits, counted in gradients."""
    last = len(came)
    sizes = [all_reduce.local.numel() for all_reduce in starts]
    if not came:
        return "no gradient is computed: call loss.backward()"
    if sizes != _ELEMENTS:
        text = f"it starts all-reduces of {sizes} elements, expected {_ELEMENTS}, in this order"
        missing = [b for b, size in enumerate(_ELEMENTS) if size not in sizes]
        if len(sizes) > len(_ELEMENTS):
            return f"{text}\neach bucket is one all-reduce"
        if missing and len(sizes) < len(_ELEMENTS):
            return f"{text}\nbucket {missing[0]} is not started, and a gradient may never come"
        if missing:
            return f"{text}\nin bucket {missing[0]} a gradient that did not come counts as zeros"
        return f"{text}\na bucket that is full waits for those before it"
    moments = _start_moments(_BUCKETS, came)
    # Where a gradient never comes, a bucket starts when backward is over.
    moments += [last] * (len(starts) - len(moments))
    for b, (start, moment) in enumerate(zip(starts, moments)):
        if start.started_at != moment:
            text = f"it starts bucket {b} at gradient {start.started_at} of {last}, expected at "
            return f"{text}gradient {moment}\na bucket starts once it is full, and in its turn"
        if start.waited_at is None:
            return f"it does not wait for bucket {b}: the sum may not be there"
        if start.waited_at < last:
            to_come = last - start.waited_at
            return f"it waits for bucket {b} while {to_come} gradients are still to come"
    return None


def _drawn_step(fn: Callable, comm: Comm) -> Tensor:
    """A backward that takes its time, with real all-reduces in a thread beside it."""
    torch.set_num_threads(1)
    layers: list[nn.Module] = []
    for _ in range(_LAYERS):
        layers += [nn.Linear(_WIDTH, _WIDTH), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(_WIDTH, 10))
    parameters = list(model.parameters())

    def start(flat: Tensor) -> SimpleNamespace:
        all_reduce = partial(fast_ring_all_reduce, tensor=flat)
        work = work_queue_of(comm).add("all_reduce", all_reduce, [flat], [flat])

        def wait() -> None:
            with comm.span("wait"):
                work.wait()

        return SimpleNamespace(wait=wait)

    buckets = assign_buckets([4 * parameter.numel() for parameter in parameters], MIB)
    loss = model(torch.randn(_DRAWN, _WIDTH)).square().sum()
    fn(loss, parameters, buckets, start, _DRAWN * comm.world_size)
    return _flat(_left(parameters), range(len(parameters)))


@lru_cache(maxsize=64)
def _of_rank(rank: int, case: Case) -> Tensor:
    return _flat(_gradients(rank, case), range(len(_SHAPES)))


# The gradients of all B samples come in another order on each rank, and some never do.
backward = Check(
    "overlap.backward",
    lambda rank, case: case.over_ranks(lambda r: _of_rank(r, case)) / case.size,
    signature="loss, parameters, buckets, start, batch_size",
    written=None,
    call=_one_step,
    inputs=lambda rank, case: (case,),
    parts=lambda case: {
        f"the sum over rank {r}'s samples": _of_rank(r, case) for r in range(case.world_size)
    },
    sizes=(_ALL_USED, _SOME_UNUSED),
    nouns=("rank", "sample"),
    special=lambda case: "some not used" if case.size == _SOME_UNUSED else "all parameters used",
    drawn_size=_DRAWN,
    link=_LINK,
)
