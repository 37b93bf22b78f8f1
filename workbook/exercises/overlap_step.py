"""The overlapping backward of page 03, on real ranks: run, judged, and drawn beside labkit's.

Symbols: P ranks, B samples in the global batch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.collectives import fast_ring_all_reduce, ring_all_reduce
from labkit.comm.comm import Comm
from labkit.comm.emulated_link import EmulatedLink
from labkit.comm.transport import check_tensor
from labkit.comm.work import work_queue_of
from labkit.errors import WorkerError
from labkit.runtime.launch import run
from labkit.runtime.output import undrawn
from labkit.schedules.bucket_assignment import MIB, assign_buckets
from labkit.strategies.ddp import BucketedDDP
from workbook.exercises.grader import WORLD_SIZES, Case, Verdict, Wrong, returns
from workbook.exercises.grader.exercise import Found, random_tensor
from workbook.exercises.grader.own_run import OwnRun
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET
from workbook.notebook import verdict

# Samples of the global batch: with so many every rank uses every parameter, or some do not.
_ALL_USED, _SOME_UNUSED = 11, 7
_FEATURES, _CLASSES = 4, 3
# In the order of registration: both layers of the trunk, two branches, one that rank 0 alone uses,
# one that nobody uses, the last layer.
_SHAPES = ((6, 4), (6,), (6, 6), (6, 6, 2), (5,), (2,), (3, 6), (3,))
_BUCKETS = ((7, 6), (5, 3), (4, 2), (1, 0))
# No two buckets have equally many elements, so a start tells which bucket it is.
_ELEMENTS = [sum(torch.Size(_SHAPES[i]).numel() for i in bucket) for bucket in _BUCKETS]


def backward(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(loss, parameters, buckets, start, batch_size)``: a backward with overlap.

    ``start(flat)`` begins the all-reduce of a tensor and returns a handle. At the end each
    parameter's ``grad`` is the gradient of the mean loss over the B samples of all ranks. Ranks
    get their gradients in different orders, and in one case some parameters get none.
    """

    def total(case: Case, divisor: int) -> list[Tensor]:
        """By parameter: the sum over the samples of all ranks, divided."""
        parameters = _parameters()
        losses = [_loss(parameters, rank, case) for rank in range(case.world_size)]
        found = torch.autograd.grad(sum(losses, torch.zeros(())), parameters, allow_unused=True)
        return [_filled(p, gradient) / divisor for p, gradient in zip(parameters, found)]

    found = returns(
        fn,
        lambda rank, case: total(case, case.size),
        name="overlap.backward",
        signature="loss, parameters, buckets, start, batch_size",
        call=_one_step,
        inputs=lambda rank, case: (case,),
        mistakes={
            "it is the sum, not divided by batch_size": lambda rank, case: total(case, 1),
            "it is divided by the number of ranks, not by batch_size": (
                lambda rank, case: total(case, case.world_size)
            ),
        },
        sizes=(_ALL_USED, _SOME_UNUSED),
        nouns=("rank", "sample"),
        special=lambda case: (
            "where not every rank uses every parameter" if case.size == _SOME_UNUSED else ""
        ),
        world_sizes=world_sizes,
    )
    found.run_again = partial(own_run, found.name, fn)
    return found


def start_moments(buckets: Sequence[Sequence[int]], order: Sequence[int]) -> list[int]:
    """By bucket: how many gradients are there when it may start; of the first buckets only.

    A bucket may start with its last gradient, and not before the buckets before it. One whose
    gradients are never all there has no entry, nor have those after it.
    """
    place = {index: number for number, index in enumerate(order, start=1)}
    full = []
    for bucket in buckets:
        if any(index not in place for index in bucket):
            break
        full.append(max(place[index] for index in bucket))
    return list(accumulate(full, max))


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(random_tensor(30 + i, *s) / 2) for i, s in enumerate(_SHAPES)]


def _filled(parameter: nn.Parameter, gradient: Tensor | None) -> Tensor:
    return torch.zeros_like(parameter) if gradient is None else gradient


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
    if case.size == _ALL_USED or rank == 0:
        out = out * rare.exp().sum()
    if case.size == _ALL_USED:
        out = out + never.sum()
    return functional.cross_entropy(out @ last.T + last_bias, targets, reduction="sum")


class _Started:
    """An all-reduce: which gradients were there when it began and was waited for.

    No clock is judged, so it is carried out only in ``wait``, with those before it. Before the
    values travel, the ranks tell each other how many there are. Where they disagree nothing
    travels, so that a wrong answer cannot hang or mix its sums.
    """

    def __init__(self, comm: Comm, ready: list[int], queue: "list[_Started]", flat: Tensor):
        check_tensor(flat, comm.device)
        self._comm, self._ready, self._queue, self._flat = comm, ready, queue, flat
        self.values = flat.detach().flatten().clone()
        self.started_at = len(ready)
        self.waited_at: int | None = None
        self._arrived = False
        queue.append(self)

    def wait(self, *_: Any) -> bool:
        if self.waited_at is None:
            self.waited_at = len(self._ready)
        while self in self._queue:
            _all_reduce_next(self._comm, self._queue)
        if not self._arrived:
            with torch.no_grad():
                self._flat.copy_(self.values.view_as(self._flat))
        self._arrived = True
        return True


def _all_reduce_next(comm: Comm, queue: list[_Started]) -> bool:
    """Take part in the ranks' next all-reduce; whether any rank had one."""
    values = queue.pop(0).values if queue else None
    counts = torch.zeros(comm.world_size)
    counts[comm.rank] = 0 if values is None else values.numel() + 1
    ring_all_reduce(comm, counts)
    if values is not None and (counts == counts[0]).all():
        ring_all_reduce(comm, values)
    return bool(counts.any())


def _one_step(fn: Callable, comm: Comm, case: Case) -> list[Tensor] | Wrong:
    """On a rank: call the learner's function; the gradients by parameter."""
    parameters, ready, queue, starts = _parameters(), [], [], []
    before = [parameter.detach().clone() for parameter in parameters]
    for i, parameter in enumerate(parameters):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: ready.append(i))

    def start(flat: Tensor) -> _Started:
        starts.append(_Started(comm, ready, queue, flat))
        return starts[-1]

    def num_hooks() -> int:
        # PyTorch has no public way to ask.
        kinds = "_post_accumulate_grad_hooks", "_backward_hooks"
        return sum(len(getattr(p, kind, None) or ()) for p in parameters for kind in kinds)

    own, loss = num_hooks(), _loss(parameters, comm.rank, case)
    fn(loss, list(parameters), [list(bucket) for bucket in _BUCKETS], start, case.size)
    while _all_reduce_next(comm, queue):
        pass
    if not all(map(torch.equal, parameters, before)):
        return Wrong("the parameters have changed; this function only sets their gradients")
    if wrong := _wrong_moments(ready, starts):
        return Wrong(wrong)
    if left := num_hooks() - own:
        return Wrong(f"{left} hooks are still on the parameters: remove them after backward")
    return [_filled(parameter, parameter.grad).detach() for parameter in parameters]


def _wrong_moments(ready: list[int], starts: list[_Started]) -> Found:
    """What is wrong with the moments of starts and waits, counted in gradients."""
    last, sizes = len(ready), [one.values.numel() for one in starts]
    if not ready:
        return "no gradient is computed: call loss.backward()"
    if sizes != _ELEMENTS:
        text = f"it starts all-reduces of {sizes} elements, expected {_ELEMENTS}, in this order"
        never = [
            f": bucket {b} is not started" for b, size in enumerate(_ELEMENTS) if size not in sizes
        ]
        return f"{text}{never[0]}, and a gradient may never come" if never else text
    moments = start_moments(_BUCKETS, ready)
    for b, one in enumerate(starts):
        so_far, latest = one.started_at, moments[b] if b < len(moments) else last
        absent = [i for i in _BUCKETS[b] if i not in ready[:so_far]]
        if so_far < last and absent:
            return f"it starts bucket {b} before gradient {absent[0]}, a part of it, is there"
        if so_far > latest:
            over = ", when backward is over" if so_far == last else ""
            return f"it starts bucket {b} at gradient {so_far}{over}, could at gradient {latest}"
        if one.waited_at is None:
            return f"it does not wait for bucket {b}: the sum may not be there"
        if one.waited_at < last:
            to_come = last - one.waited_at
            return f"it waits for bucket {b} while {to_come} gradients are still to come"
    return None


# Gigabit Ethernet: a message needs about as long as the layer that it hides behind.
_LINK = EmulatedLink(0.001, 125e6)
_WIDTH, _LAYERS, _SAMPLES, _STEPS = 512, 6, 256, 3


def own_run(name: str, fn: Callable, status: str, world_size: int = 2) -> OwnRun:
    """Run a learner's backward for a few steps, for its timeline; nothing is raised."""
    from workbook.plots.timeline import timeline  # ranks load the checks, but draw nothing

    if status == NOT_ATTEMPTED:
        return OwnRun.failed(name, status)
    options = {"world_size": world_size, "device": "cpu", "timeout_s": 30, "link": _LINK}
    try:
        with undrawn():
            results = [run(_steps, one, **options) for one in (fn, None)]
    except (WorkerError, ValueError):
        return OwnRun.failed(name, status)
    figures = []
    for result, whose in zip(results, ("your backward", "labkit's BucketedDDP")):
        updates = [result.trace.of(rank, "update") for rank in result.trace.ranks]
        start_s, end_s = (max(own[step].end_s for own in updates) for step in (-2, -1))
        title = f"One step, {whose}"
        figures.append(timeline(result, title=title, start_s=start_s, end_s=end_s))
    rows = {
        "all-reduces per step": [str(one.values[0]) for one in results],
        "hidden communication": [f"{one.explain().hidden:.0%}" for one in results],
    }
    caption = f"{world_size} ranks over a link of 1 ms and 125 MB/s, {_LAYERS} layers, {_SAMPLES} "
    caption += "samples per rank."
    text = "not right yet" if status == NOT_YET else status
    said = f"{text}. {verdict.overlap(results[0]).text}"
    return OwnRun(name, said, ["yours", "labkit"], rows, caption, *figures)


def _steps(comm: Comm, fn: Callable | None) -> int:
    """On a rank: a few training steps by ``fn``, or by BucketedDDP; the all-reduces per step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [part for _ in range(_LAYERS) for part in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(_WIDTH, 10))
    labkits = None if fn else BucketedDDP(comm, model, bucket_mb=1, op="sum")
    parameters, started = list(model.parameters()), []
    buckets = assign_buckets([4 * p.numel() for p in parameters], MIB)
    inputs, targets = torch.randn(_SAMPLES, _WIDTH), torch.randint(10, (_SAMPLES,))
    batch_size, optimizer = _SAMPLES * comm.world_size, torch.optim.SGD(parameters, lr=1e-3)

    def start(flat: Tensor) -> SimpleNamespace:
        all_reduce = partial(fast_ring_all_reduce, tensor=flat)
        started.append(work_queue_of(comm).add("all_reduce", all_reduce, [flat], [flat]))

        def wait(work: Any = started[-1]) -> None:
            with comm.span("wait"):
                work.wait()

        return SimpleNamespace(wait=wait)

    for _ in range(_STEPS):
        comm.barrier()
        optimizer.zero_grad()
        with comm.span("compute"):
            loss = functional.cross_entropy((labkits or model)(inputs), targets, reduction="sum")
            if fn:
                fn(loss, parameters, buckets, start, batch_size)
            else:
                (loss / batch_size).backward()
        with comm.span("update"):
            optimizer.step()
    return len(labkits.buckets) if labkits else len(started) // _STEPS
