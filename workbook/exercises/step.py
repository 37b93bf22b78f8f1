"""Page 01: time a step, count operations and bytes, cut the batch, scale the loss.

They need no ranks. Symbols: n samples.
"""

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.units import format_seconds
from workbook.exercises.grader import Verdict, answers, ask
from workbook.exercises.grader.compare import agree, fit, short
from workbook.exercises.grader.exercise import Found, random_tensor
from workbook.exercises.grader.in_process import Question

# Odd, even and one: only an odd number of repeats has a single median.
REPEATS = (7, 4, 1)
# By which factors the calls of a step are slower than the step itself; the first is cold, one in
# five is disturbed.
_COLD, _SLOWER = 12.0, (1.1, 1.0, 1.3, 6.0, 1.2)
_MOST_WARM_UPS = 10


class Clock:
    """A simulated machine: ``step()`` takes its time, ``read()`` tells the time in seconds."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._begin_s = 41.5

    def step(self) -> None:
        number = len(self.seconds)
        factor = _SLOWER[number % len(_SLOWER)] + 0.01 * number if number else _COLD
        self.seconds.append(0.002 * factor)

    def read(self) -> float:
        return self._begin_s + sum(self.seconds)


class _Timed(NamedTuple):
    """One call of the learner's function: the seconds of each step, and what it returned."""

    seconds: list[float]
    found: Any


def timer(fn: Callable) -> Verdict:
    """Grade ``fn(step, clock, repeats)``: the median seconds of ``repeats`` steps, warmed up.

    ``step()`` makes a step of a simulated machine, ``clock()`` returns its time in seconds. One
    step at least has to warm up. Of an even number, anything between the two middle ones will do.
    """

    def call(fn: Callable, repeats: int) -> _Timed:
        clock = Clock()
        found = fn(clock.step, clock.read, repeats)
        return _Timed(clock.seconds, fit(found, 0.0))

    def wrong(question: Question, taken: _Timed) -> Found:
        (repeats,), calls = question.args, len(taken.seconds)
        if not repeats < calls <= repeats + _MOST_WARM_UPS:
            why = "none of them warms up" if calls == repeats else "and one or a few warm up"
            return f"{question.words}: step was called {calls} times, {why}"
        if not isinstance(taken.found, (int, float)):
            return f"{question.words}: the function returned {short(taken.found)}, no number"
        timed = taken.seconds[-repeats:]
        low, high = statistics.median_low(timed), statistics.median_high(timed)
        if low - 1e-9 <= taken.found <= high + 1e-9:
            return None
        looks = {
            "the mean": statistics.fmean(timed),
            "the median with the warm-up in it": statistics.median(taken.seconds),
            "the total": sum(timed),
        }
        like = next((f", {name}" for name, s in looks.items() if abs(s - taken.found) < 1e-9), "")
        text = f"{question.words}: the function returned {taken.found:.6g} s{like}, "
        return f"{text}expected the median of the repeats, {statistics.median(timed):.6g} s"

    return ask(
        "step.timer",
        fn,
        [Question((repeats,), f"with repeats={repeats}") for repeats in REPEATS],
        wrong,
        call=call,
        right=lambda found: f"{REPEATS[0]} steps, median {format_seconds(found[0].found)}",
        signature="step, clock, repeats",
    )


# samples, side, c_in, c_out, window
_CONVOLUTIONS = ((64, 8, 1, 32, 3), (64, 4, 32, 64, 3), (1, 5, 3, 2, 1), (7, 6, 2, 5, 5))


def flops(fn: Callable) -> Verdict:
    """Grade ``fn(samples, side, c_in, c_out, window)``: the operations of a convolution.

    Images [samples, c_in, side, side], output [samples, c_out, side, side], a multiply-add counts
    as two.
    """

    def count(samples: int, side: int, c_in: int, c_out: int, window: int) -> int:
        return 2 * samples * side**2 * c_in * c_out * window**2

    return answers(
        fn,
        {conv: count(*conv) for conv in _CONVOLUTIONS},
        name="step.flops",
        signature="samples, side, c_in, c_out, window",
        mistakes={
            "a multiply-add counts as two": lambda *conv: count(*conv) // 2,
            "the window has window x window numbers": (
                lambda n, s, i, o, w: 2 * n * s**2 * i * o * w
            ),
            "every output number reads a window of all c_in channels": (
                lambda n, s, i, o, w: 2 * n * s**2 * o * w**2
            ),
        },
    )


# num_parameters, state, kept_bytes, memory_bytes; the last one is too small for any sample
_MEMORIES = (
    *((29_066, 1, 26_928, 2**20), (29_066, 0, 26_928, 2**20), (1_000, 2, 100, 26_000)),
    *((1_000, 2, 100, 25_999), (1_000, 1, 7, 12_000), (1_000_000, 2, 100, 2**20)),
)


def largest_batch(fn: Callable) -> Verdict:
    """Grade ``fn(num_parameters, state, kept_bytes, memory_bytes)``: the largest batch that fits.

    A parameter takes 4 bytes, its gradient as many, and the optimizer keeps ``state`` numbers of 4
    bytes for it; a sample keeps ``kept_bytes`` for backward. 0 if not even one sample fits.
    """

    def largest(parameters: int, state: int, kept: int, memory: int, others: int = 2) -> int:
        return max(0, (memory - 4 * (others + state) * parameters) // kept)

    return answers(
        fn,
        {memory: largest(*memory) for memory in _MEMORIES},
        name="step.largest_batch",
        signature="num_parameters, state, kept_bytes, memory_bytes",
        mistakes={
            "the gradients are missing: one number for each parameter": partial(largest, others=1),
            "the optimizer's state is missing": lambda p, s, k, m: largest(p, 0, k, m),
            "it is negative where not even one sample fits": (
                lambda p, s, k, m: (m - 4 * (2 + s) * p) // k
            ),
        },
    )


# n samples, the most in a micro-batch
_BATCHES = ((10, 4), (12, 4), (7, 3), (3, 8), (5, 1))


class _Accumulated(NamedTuple):
    """What a call left behind: the gradients, the sizes of the micro-batches, in which order.

    ``order`` has an F for each forward pass, and a B when backward has come back to its output.
    """

    gradients: list
    sizes: list[int]
    order: str


def _model() -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for key, parameter in enumerate(layers.parameters()):
        parameter.data.copy_(random_tensor(key, *parameter.shape))
    return layers


def _batch(samples: int) -> tuple[Tensor, Tensor]:
    return random_tensor(samples, samples, 6).double(), torch.arange(samples) ** 2 % 3


def _gradients(samples: int, sizes: list[int], reduction: str) -> list[Tensor]:
    """Of the sum over the micro-batches of their summed, or mean, losses."""
    layers, (inputs, targets) = _model(), _batch(samples)
    with torch.enable_grad():
        for x, y in zip(inputs.split(sizes), targets.split(sizes)):
            functional.cross_entropy(layers(x), y, reduction=reduction).backward()
    return [torch.as_tensor(parameter.grad) for parameter in layers.parameters()]


def accumulate(fn: Callable) -> Verdict:
    """Grade ``fn(model, inputs, targets, most)``: gradients of a batch, in micro-batches.

    ``inputs`` [n, 6], ``targets`` [n]. Afterwards ``grad`` of each parameter has to be the
    gradient of the mean cross-entropy over the n samples. Forward and backward run on one
    micro-batch, of ``most`` samples at most, before the next.
    """

    def call(fn: Callable, samples: int, most: int) -> _Accumulated:
        layers, order, sizes = _model(), [], []

        def note(module: nn.Module, given: tuple, output: Tensor) -> None:
            order.append("F")
            sizes.append(len(output))
            if output.requires_grad:
                output.register_hook(lambda gradient: order.append("B"))

        layers.register_forward_hook(note)
        with torch.enable_grad():
            fn(layers, *_batch(samples), most)
        return _Accumulated([p.grad for p in layers.parameters()], sizes, "".join(order))

    def wrong(question: Question, found: _Accumulated) -> Found:
        (samples, most), text = question.args, f"{question.words}: "
        if max(found.sizes, default=0) > most:
            return f"{text}a micro-batch has {max(found.sizes)} samples, {most} at most fit"
        if sum(found.sizes) != samples:
            return f"{text}the model ran on micro-batches of {found.sizes} samples"
        if "B" not in found.order or any(one is None for one in found.gradients):
            return f"{text}a parameter has no gradient: call backward"
        if "FF" in found.order:
            return (
                f"{text}two micro-batches are kept at once: backward runs before the next forward"
            )
        sums = _gradients(samples, found.sizes, "sum")
        if agree(found.gradients, [one / samples for one in sums]):
            return None
        means = _gradients(samples, found.sizes, "mean")
        looks = {
            ": every micro-batch has the same weight, however many samples it has": [
                one / len(found.sizes) for one in means
            ],
            ": the micro-batches' means are added up": means,
            ": it is the sum over the samples": sums,
        }
        why = next((name for name, one in looks.items() if agree(found.gradients, one)), "")
        return f"{text}the gradients are not those of the mean loss over the batch{why}"

    return ask(
        "step.accumulate",
        fn,
        [Question(one, f"with n={one[0]} and most={one[1]}") for one in _BATCHES],
        wrong,
        call=call,
        right=lambda found: f"micro-batches of {found[0].sizes}: the gradient of the whole batch",
        signature="model, inputs, targets, most",
    )


_INF = float("inf")
# gradient, scale, good
_UPDATES: tuple[tuple[list[float], float, int], ...] = (
    *(([4.0, -8.0, 2.0], 4.0, 0), ([4.0, _INF, 2.0], 4.0, 1), ([4.0, -_INF, _INF], 4.0, 2)),
    *(([float("nan"), -8.0, 2.0], 1024.0, 1), ([4.0, -8.0, 2.0], 1024.0, 2)),
    *(([0.0, 0.0, 0.0], 8.0, 1), ([4.0, -8.0, _INF], 2.0, 0), ([2.0, 1.0, -0.5], 0.25, 2)),
)


def loss_scaling(fn: Callable) -> Verdict:
    """Grade ``fn(weight, gradient, scale, good, lr, patience)``: one update with loss scaling.

    ``gradient`` [N] is ``scale`` times the gradient of the loss; ``good`` counts the updates since
    the scale last changed. Expected is (weight, scale, good).
    """

    def updated(
        weight: Tensor, gradient: Tensor, scale: float, good: int, lr: float, patience: int
    ) -> list:
        if not gradient.isfinite().all():
            return [weight, scale / 2, 0]
        weight = weight - lr * gradient / scale
        return [weight, 2 * scale, 0] if good + 1 >= patience else [weight, scale, good + 1]

    def scaled(weight: Tensor, gradient: Tensor, scale: float, *rest: Any) -> list:
        return updated(weight, gradient * scale, scale, *rest)

    def sees_no_nan(weight: Tensor, gradient: Tensor, *rest: Any) -> list:
        found = updated(weight, gradient.nan_to_num(0.0, _INF, -_INF), *rest)
        return [found[0] + 0 * gradient, *found[1:]] if gradient.isnan().any() else found

    start = torch.tensor([1.0, 2.0, 3.0])
    cases = [(start, torch.tensor(g), scale, good, 0.5, 3) for g, scale, good in _UPDATES]
    return answers(
        fn,
        [(case, updated(*case)) for case in cases],
        name="step.loss_scaling",
        signature="weight, gradient, scale, good, lr, patience",
        mistakes={
            "the gradient is still multiplied by the scale: divide before the update": scaled,
            "infinity is noticed, but not NaN: isfinite finds both": sees_no_nan,
        },
    )
