"""The overlapping backward of page 03, on real ranks: run, judged, and drawn beside labkit's.

Symbols: P ranks, B samples in the global batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.collectives import fast_ring_all_reduce, ring_all_reduce
from labkit.comm.comm import Comm
from labkit.comm.emulated_link import EmulatedLink
from labkit.comm.tensors import check_tensor
from labkit.comm.work import WorkQueue, work_queue_of
from labkit.errors import WorkerError
from labkit.runtime.launch import RunResult, run
from labkit.runtime.output import undrawn
from labkit.schedules.bucket_assignment import MIB, assign_buckets
from labkit.strategies.ddp import BucketedDDP
from labkit.units import format_number, format_seconds
from workbook.exercises.grader import WORLD_SIZES, Case, Verdict, Wrong, returns
from workbook.exercises.grader.compare import same, short
from workbook.exercises.grader.exercise import Found, random_tensor
from workbook.exercises.grader.in_process import OutOfTime, limited_time
from workbook.exercises.grader.own_run import OwnRun
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET
from workbook.notebook import verdict

if TYPE_CHECKING:
    from workbook.plots import CaptionedFigure

# A step of the learner's function takes milliseconds.
_MOST_S = 2.0
# Samples of the global batch: with so many every rank uses every parameter, or some do not.
ALL_USED, SOME_UNUSED = 11, 7
_FEATURES, _CLASSES = 4, 3
# In the order of registration: both layers of the trunk, two branches, one that rank 0 alone uses,
# one that nobody uses, the last layer.
SHAPES = ((6, 4), (6,), (6, 6), (6, 6, 2), (5,), (2,), (3, 6), (3,))
BUCKETS = ((7, 6), (5, 3), (4, 2), (1, 0))
_SIZES = [torch.Size(shape).numel() for shape in SHAPES]
# No two buckets have equally many elements, so a start tells which bucket it is.
BUCKET_OF_SIZE = {sum(_SIZES[i] for i in bucket): b for b, bucket in enumerate(BUCKETS)}


def backward(fn: Callable, *, world_sizes: tuple[int, ...] = WORLD_SIZES) -> Verdict:
    """Grade ``fn(loss, parameters, buckets, start, batch_size)``: a backward with overlap.

    ``start(flat)`` begins the all-reduce of a tensor and returns a handle. At the end each
    parameter's ``grad`` is the gradient of the mean loss over the B samples of all ranks. Two
    steps are made with one model. Ranks get their gradients in different orders, and in one case
    some parameters get none.
    """
    words = {SOME_UNUSED: "where not every rank uses every parameter"}
    found = returns(
        fn,
        name="overlap.backward",
        signature="loss, parameters, buckets, start, batch_size",
        call=_two_steps,
        inputs=lambda rank, case: (case,),
        judge=_judge,
        sizes=(ALL_USED, SOME_UNUSED),
        nouns=("rank", "sample"),
        special=lambda case: words.get(case.size, ""),
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
    """What a rank returns. (No tuple: a check makes lists of those.)"""

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

        def note_wait() -> None:
            if self.waits[number] is None:
                self.waits[number] = len(self.ready)

        started = _Started(flat, note_wait)
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
    return functional.cross_entropy(out @ last.T + last_bias, targets, reduction="sum")


def _two_steps(fn: Callable, comm: Comm, case: Case) -> Steps | Wrong:
    """On a rank: two calls of the learner's function, with one model."""
    if case.call:
        # The second step has shown already what the function keeps from one call to the next.
        return Steps()
    parameters, steps = _parameters(), []
    watch = _Watch(comm, parameters)
    try:
        for number in range(2):
            watch.begin()
            loss = _loss(parameters, comm.rank, case, number)
            done = _one_step(fn, watch, parameters, loss, case)
            if isinstance(done, Wrong):
                return done
            steps.append(done)
    finally:
        watch.close()
    return Steps(steps)


def _one_step(
    fn: Callable, watch: _Watch, parameters: list[nn.Parameter], loss: Tensor, case: Case
) -> Step | Wrong:
    def num_hooks() -> int:
        # PyTorch has no public way to ask.
        kinds = "_post_accumulate_grad_hooks", "_backward_hooks"
        return sum(len(getattr(p, kind, None) or ()) for p in parameters for kind in kinds)

    for parameter in parameters:
        parameter.grad = None
    before, hooks = [parameter.detach().clone() for parameter in parameters], num_hooks()
    try:
        with limited_time(_MOST_S):
            fn(loss, list(parameters), [list(b) for b in BUCKETS], watch.start, case.size)
    except OutOfTime:
        absent = [i for i in range(len(parameters)) if i not in watch.ready]
        text = f"the function had not ended after {_MOST_S:g} s; no gradient came for parameters "
        return Wrong(f"{text}{absent}, and a hook on such a parameter never runs")
    finally:
        watch.until_all_end()
    if not all(map(torch.equal, parameters, before)):
        return Wrong("the parameters have changed; this function only sets their gradients")
    found = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
    return Step(watch.ready, watch.starts, watch.waits, found, num_hooks() - hooks)


def _judge(case: Case, values: list[Any]) -> Found:
    for number, steps in enumerate(zip(*(value.steps for value in values))):
        for rank, step in enumerate(steps):
            if wrong := _wrong_moments(step):
                return f"rank {rank} {wrong}"
        if wrong := _wrong_gradients(case, steps, number):
            return wrong
        if left := max(step.hooks for step in steps):
            return f"{left} hooks are still on the parameters: remove them after backward"
    return None


def _wrong_moments(step: Step) -> Found:
    """What is wrong with the moments of starts and waits; nothing here depends on a clock."""
    last = len(step.ready)
    if not step.ready:
        return "computes no gradient: call loss.backward()"
    buckets = [BUCKET_OF_SIZE.get(size) for size, _ in step.starts]
    if buckets != [*range(len(BUCKETS))]:
        sizes = [size for size, _ in step.starts]
        text = (
            f"starts all-reduces of {sizes} elements, expected {[*BUCKET_OF_SIZE]}, in this order"
        )
        never = [b for b in range(len(BUCKETS)) if b not in buckets]
        why = (
            f": bucket {never[0]} is never started, also if a gradient never comes"
            if never
            else ""
        )
        return text + why
    moments = start_moments(BUCKETS, step.ready)
    for b, ((_, so_far), waited) in enumerate(zip(step.starts, step.waits)):
        latest = moments[b] if b < len(moments) else last
        absent = [i for i in BUCKETS[b] if i not in step.ready[:so_far]]
        if so_far < last and absent:
            return f"starts bucket {b} before gradient {absent[0]}, which belongs to it, is there"
        if so_far > latest:
            over = ", when backward is over" if so_far == last else ""
            return f"starts bucket {b} at gradient {so_far}{over}, but could at gradient {latest}"
        if waited is None:
            return f"does not wait for bucket {b}: the sum may not be there"
        if waited < last:
            return f"waits for bucket {b} while {last - waited} gradients are still to come"
    return None


def _wrong_gradients(case: Case, steps: Sequence[Step], number: int) -> Found:
    own = []
    for rank in range(case.world_size):
        parameters = _parameters()
        loss = _loss(parameters, rank, case, number)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        own.append([torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found)])
    total = [torch.stack(of_ranks).sum(0) for of_ranks in zip(*own)]
    for rank, step in enumerate(steps):
        looks = {
            "the sum, not divided by batch_size": total,
            "divided by the number of ranks, not by batch_size": [
                t / case.world_size for t in total
            ],
            "this rank's own": [one / case.size for one in own[rank]],
        }
        for index, found in enumerate(step.gradients):
            expected = total[index] / case.size
            if (found is None and not expected.any()) or same(found, expected):
                continue
            like = [name for name, of in looks.items() if same(found, of[index])]
            seen = like[0] if like else short(found)
            text = f"rank {rank} is the first with a wrong gradient, in parameters[{index}].grad: "
            return f"{text}{seen}, expected {short(expected)}"
    return None


# The learner's backward, drawn

# Gigabit Ethernet: a message needs about as long as the layer that it hides behind.
LINK = EmulatedLink(0.001, 125e6)
_WIDTH, _LAYERS, _SAMPLES, _STEPS = 512, 6, 256, 3
_TIMEOUT_S = 30.0


def own_run(name: str, fn: Callable, status: str, world_size: int = 2) -> OwnRun:
    """Run a learner's backward for a few steps, for its timeline; nothing is raised."""
    if status == NOT_ATTEMPTED:
        return OwnRun.failed(name, status)
    options = {"world_size": world_size, "device": "cpu", "timeout_s": _TIMEOUT_S, "link": LINK}
    try:
        with undrawn():
            results = [run(_steps, one, **options) for one in (fn, None)]
    except (WorkerError, ValueError):
        return OwnRun.failed(name, status)
    titles = "One step, your backward", "One step, labkit's BucketedDDP"
    figures = [_last_step(result, title) for result, title in zip(results, titles)]
    rows = {
        "all-reduces per step": [str(one.values[0]) for one in results],
        "hidden communication": [f"{one.explain().hidden:.0%}" for one in results],
    }
    megabytes_per_s = format_number(LINK.bandwidth_bytes_per_s / 1e6)
    link = f"a link of {format_seconds(LINK.latency_s)} and {megabytes_per_s} MB/s"
    caption = f"{world_size} ranks over {link}, {_LAYERS} layers, {_SAMPLES} samples per rank."
    text = "not right yet" if status == NOT_YET else status
    said = f"{text}. {verdict.overlap(results[0]).text}"
    return OwnRun(name, said, ["yours", "labkit"], rows, caption, *figures)


class _Shown:
    """An all-reduce under way, whose ``wait`` is recorded as waiting."""

    def __init__(self, comm: Comm, flat: Tensor):
        self._comm, queue = comm, work_queue_of(comm)
        all_reduce = partial(fast_ring_all_reduce, tensor=flat)
        self._work = queue.add("all_reduce", all_reduce, [flat], [flat])

    def wait(self) -> None:
        with self._comm.span("wait"):
            self._work.wait()


def _steps(comm: Comm, fn: Callable | None) -> int:
    """On a rank: a few training steps by ``fn``, or by BucketedDDP; the all-reduces per step."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [part for _ in range(_LAYERS) for part in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(_WIDTH, 10))
    labkits = None if fn else BucketedDDP(comm, model, bucket_mb=1, op="sum")
    parameters = list(model.parameters())
    buckets = assign_buckets([4 * p.numel() for p in parameters], MIB)
    batch_size, started = _SAMPLES * comm.world_size, []
    inputs, targets = torch.randn(_SAMPLES, _WIDTH), torch.randint(10, (_SAMPLES,))
    optimizer = torch.optim.SGD(parameters, lr=1e-3)

    def start(flat: Tensor) -> _Shown:
        started.append(_Shown(comm, flat))
        return started[-1]

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


def _last_step(result: RunResult, title: str) -> "CaptionedFigure":
    # Imported here: ranks load the checks, but draw nothing.
    from workbook.plots.timeline import timeline

    updates = [result.trace.of(rank, "update") for rank in result.trace.ranks]
    start_s = max(own[-2].end_s for own in updates)
    end_s = max(own[-1].end_s for own in updates)
    return timeline(result, title=title, start_s=start_s, end_s=end_s)
