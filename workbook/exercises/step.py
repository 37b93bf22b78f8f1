"""Checks of page 01: time a step, count operations and bytes, cut the batch, scale the loss.

They need no ranks. Symbols: n samples.
"""

import copy
import itertools
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from labkit.units import format_seconds
from workbook.exercises.grader import Mistake, Verdict, answers
from workbook.exercises.grader.compare import agree, fit, plain
from workbook.exercises.grader.exercise import random_tensor
from workbook.exercises.grader.in_process import Question, ask
from workbook.exercises.grader.report import told

# Odd, even and one: only an odd number of repeats has a single median.
REPEATS = (7, 4, 1)
# By which factors the calls of a step are slower than the step itself; the first is cold, one in
# five is disturbed.
_COLD = 12.0
_SLOWER = (1.1, 1.0, 1.3, 6.0, 1.2)
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
    questions = [Question((repeats,), f"with repeats={repeats}") for repeats in REPEATS]
    judge = partial(
        *(ask, "step.timer", fn, questions, _wrong_time),
        call=_timed,
        right=lambda found: f"{REPEATS[0]} steps, median {format_seconds(found[0].found)}",
        signature="step, clock, repeats",
    )
    return told("step.timer", judge)


def _timed(fn: Callable, repeats: int) -> _Timed:
    clock = Clock()
    found = fn(clock.step, clock.read, repeats)
    return _Timed(clock.seconds, fit(found, 0.0))


def _wrong_time(question: Question, taken: _Timed) -> Mistake | None:
    (repeats,) = question.args
    calls, seconds = len(taken.seconds), taken.seconds[-repeats:]
    kind = isinstance(taken.found, (int, float))
    wrong = None if kind else Mistake("timer.kind", kind=type(taken.found).__name__)
    if kind and not _is_median(taken.found, seconds):
        looks = [id for id, rule in _WRONG_TIMES if _near(rule(taken.seconds, repeats), taken)]
        due = format_seconds(statistics.median(seconds))
        found = format_seconds(taken.found)
        wrong = Mistake(looks[0]) if looks else Mistake("timer.other", found=found, due=due)
    if calls == repeats and (kind or not calls):
        wrong = Mistake("timer.no_warm_up")
    elif not repeats < calls <= repeats + _MOST_WARM_UPS:
        wrong = Mistake("timer.calls", calls=calls, repeats=repeats)
    return Mistake("told.place", place=question.words, what=wrong) if wrong else None


def _is_median(found: float, seconds: list[float]) -> bool:
    low, high = statistics.median_low(seconds), statistics.median_high(seconds)
    return low - 1e-9 <= found <= high + 1e-9


def _near(seconds: float, taken: _Timed) -> bool:
    return abs(seconds - taken.found) < 1e-9 * 41.5


# A mistake's id, and what it makes of the seconds of all calls and the number of repeats.
_WRONG_TIMES: list[tuple[str, Callable[[list[float], int], float]]] = [
    ("timer.cold", lambda s, n: statistics.median(s)),
    ("timer.mean", lambda s, n: statistics.fmean(s[-n:])),
    ("timer.mean", lambda s, n: statistics.fmean(s)),
    ("timer.mean", lambda s, n: sum(s) / n),
    ("timer.best", lambda s, n: min(s)),
    ("timer.total", lambda s, n: sum(s[-n:])),
    ("timer.milliseconds", lambda s, n: 1e3 * statistics.median(s[-n:])),
    ("timer.one", lambda s, n: s[-1]),
    ("timer.one", lambda s, n: s[0]),
]


# samples, side, c_in, c_out, window
_CONVOLUTIONS = ((64, 8, 1, 32, 3), (64, 4, 32, 64, 3), (1, 5, 3, 2, 1), (7, 6, 2, 5, 5))


def flops(fn: Callable) -> Verdict:
    """Grade ``fn(samples, side, c_in, c_out, window)``: the operations of a convolution.

    Images [samples, c_in, side, side], output [samples, c_out, side, side], a multiply-add counts
    as two.
    """
    return answers(
        fn,
        {conv: _conv_flops(*conv) for conv in _CONVOLUTIONS},
        name="step.flops",
        signature="samples, side, c_in, c_out, window",
        mistakes={
            "flops.multiply_adds": lambda *conv: _conv_flops(*conv) // 2,
            "flops.window": lambda n, s, i, o, w: 2 * n * s**2 * i * o * w,
            "flops.side": lambda n, s, i, o, w: 2 * n * s * i * o * w**2,
            "flops.inputs": lambda n, s, i, o, w: 2 * n * s**2 * o * w**2,
            "flops.outputs": lambda n, s, i, o, w: 2 * n * s**2 * i * w**2,
            "flops.samples": lambda n, s, i, o, w: _conv_flops(1, s, i, o, w),
            "flops.channels_added": lambda n, s, i, o, w: 2 * n * s**2 * (i + o) * w**2,
        },
    )


def _conv_flops(samples: int, side: int, c_in: int, c_out: int, window: int) -> int:
    return 2 * samples * side**2 * c_in * c_out * window**2


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
    return answers(
        fn,
        {memory: _largest_batch(*memory) for memory in _MEMORIES},
        name="step.largest_batch",
        signature="num_parameters, state, kept_bytes, memory_bytes",
        mistakes={
            "memory.no_gradients": lambda p, s, k, m: _samples(m - 4 * (1 + s) * p, k),
            "memory.no_state": lambda p, s, k, m: _samples(m - 8 * p, k),
            "memory.numbers": lambda p, s, k, m: _samples(m - (2 + s) * p, k),
            "memory.kept_alone": lambda p, s, k, m: _samples(m, k),
            "memory.state_alone": lambda p, s, k, m: _samples(m - 4 * s * p, k),
            "memory.negative": lambda p, s, k, m: (m - 4 * (2 + s) * p) // k,
            "memory.rounded_up": lambda p, s, k, m: max(0, -((4 * (2 + s) * p - m) // k)),
            "memory.fraction": lambda p, s, k, m: max(0.0, (m - 4 * (2 + s) * p) / k),
        },
    )


def _samples(left_bytes: int, kept_bytes: int) -> int:
    return max(0, left_bytes // kept_bytes)


def _largest_batch(num_parameters: int, state: int, kept_bytes: int, memory_bytes: int) -> int:
    return _samples(memory_bytes - 4 * (2 + state) * num_parameters, kept_bytes)


# n samples, the most in a micro-batch
_BATCHES = ((10, 4), (12, 4), (7, 3), (3, 8), (5, 1))


class _Accumulated(NamedTuple):
    """What a call left behind: the gradients, the sizes of the micro-batches, in which order.

    ``order`` has an F for each forward pass, and a B when backward has come back to its output.
    """

    gradients: list
    sizes: list[int]
    order: str


def accumulate(fn: Callable) -> Verdict:
    """Grade ``fn(model, inputs, targets, most)``: gradients of a batch, in micro-batches.

    ``inputs`` [n, 6], ``targets`` [n]. Afterwards ``grad`` of each parameter has to be the
    gradient of the mean cross-entropy over the n samples. Forward and backward run on one
    micro-batch, of ``most`` samples at most, before the next.
    """
    questions = [Question(batch, f"with n={batch[0]} and most={batch[1]}") for batch in _BATCHES]
    judge = partial(
        *(ask, "step.accumulate", fn, questions, _wrong_gradients),
        call=_accumulated,
        right=lambda found: f"micro-batches of {found[0].sizes}: the gradient of the whole batch",
        signature="model, inputs, targets, most",
    )
    return told("step.accumulate", judge)


def _model() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    for key, parameter in enumerate(model.parameters()):
        parameter.data.copy_(random_tensor(key, *parameter.shape))
    return model


def _batch(samples: int) -> tuple[Tensor, Tensor]:
    return random_tensor(samples, samples, 6).double(), torch.arange(samples) ** 2 % 3


def _accumulated(fn: Callable, samples: int, most: int) -> _Accumulated:
    model, order, sizes = _model(), [], []

    def note(module: nn.Module, given: tuple, output: Tensor) -> None:
        order.append("F")
        sizes.append(len(output))
        if output.requires_grad:
            output.register_hook(lambda gradient: order.append("B"))

    model.register_forward_hook(note)
    with torch.enable_grad():
        fn(model, *_batch(samples), most)
    return _Accumulated([p.grad for p in model.parameters()], sizes, "".join(order))


def _wrong_gradients(question: Question, found: _Accumulated) -> Mistake | None:
    samples, most = question.args
    wrong = _wrong_micro_batches(samples, most, found)
    # With gradients of the sum over samples: those of each micro-batch.
    parts = _by_part(samples, found.sizes) if wrong is None else []
    due = [sum(one) / samples for one in zip(*parts)]
    if wrong is None and not _equal(found.gradients, due):
        looks = [id for id, rule in _WRONG_SUMS if _equal(found.gradients, rule(parts, found))]
        wrong = Mistake(looks[0] if looks else "accumulate.other")
    return Mistake("told.place", place=question.words, what=wrong) if wrong else None


def _wrong_micro_batches(samples: int, most: int, found: _Accumulated) -> Mistake | None:
    if not found.sizes:
        return Mistake("accumulate.no_forward")
    if max(found.sizes) > most:
        return Mistake("accumulate.too_large", size=max(found.sizes), most=most)
    if "B" not in found.order or any(gradient is None for gradient in found.gradients):
        return Mistake("accumulate.none")
    if sum(found.sizes) != samples:
        return Mistake("accumulate.samples", sizes=found.sizes, samples=samples)
    return Mistake("accumulate.all_kept") if "FF" in found.order else None


Parts = list[list[Tensor]]


def _by_part(samples: int, sizes: list[int]) -> Parts:
    inputs, targets = _batch(samples)
    parts = []
    for first, last in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        model = _model()
        with torch.enable_grad():
            outputs = model(inputs[first:last])
            functional.cross_entropy(outputs, targets[first:last], reduction="sum").backward()
        parts.append([plain(p.grad) for p in model.parameters()])
    return parts


def _equal(found: list, due: list) -> bool:
    return agree(found, due)


def _weighted(parts: Parts, weights: list[float]) -> list[Tensor]:
    by_parameter = map(torch.stack, zip(*parts))
    return [torch.tensordot(torch.tensor(weights).double(), one, 1) for one in by_parameter]


# A mistake's id, and the gradients that it leads to.
_WRONG_SUMS: list[tuple[str, Callable[[Parts, _Accumulated], list[Tensor]]]] = [
    (
        "accumulate.mean_of_means",
        lambda parts, f: _weighted(parts, [1 / n / len(f.sizes) for n in f.sizes]),
    ),
    ("accumulate.sum_of_means", lambda parts, f: _weighted(parts, [1 / n for n in f.sizes])),
    ("accumulate.sum", lambda parts, f: _weighted(parts, [1.0] * len(f.sizes))),
    ("accumulate.last", lambda parts, f: [one / f.sizes[-1] for one in parts[-1]]),
    ("accumulate.last", lambda parts, f: [one / sum(f.sizes) for one in parts[-1]]),
    (
        "accumulate.by_parts",
        lambda parts, f: _weighted(parts, [1 / len(f.sizes)] * len(f.sizes)),
    ),
]


_LR, _PATIENCE = 0.5, 3
_INF = float("inf")
# gradient, scale, good
_UPDATES: tuple[tuple[list[float], float, int], ...] = (
    *(([4.0, -8.0, 2.0], 4.0, 0), ([4.0, _INF, 2.0], 4.0, 1), ([4.0, -_INF, _INF], 4.0, 2)),
    *(([float("nan"), -8.0, 2.0], 1024.0, 1), ([4.0, -8.0, 2.0], 1024.0, 2)),
    *(([0.0, 0.0, 0.0], 8.0, 1), ([4.0, -8.0, _INF], 2.0, 0)),
)


def loss_scaling(fn: Callable) -> Verdict:
    """Grade ``fn(weight, gradient, scale, good, lr, patience)``: one update with loss scaling.

    ``gradient`` [N] is ``scale`` times the gradient of the loss; ``good`` counts the updates since
    the scale last changed. Expected is (weight, scale, good).
    """
    weight = torch.tensor([1.0, 2.0, 3.0])
    questions = [
        ((weight, torch.tensor(gradient), scale, good, _LR, _PATIENCE), 0)
        for gradient, scale, good in _UPDATES
    ]
    return answers(
        fn,
        [(args, _scaled_update(*copy.deepcopy(args))) for args, _ in questions],
        name="step.loss_scaling",
        signature="weight, gradient, scale, good, lr, patience",
        mistakes={
            "scaler.still_scaled": partial(_scaled_update, unscaled=False),
            "scaler.updated_anyway": partial(_scaled_update, skips="nothing"),
            "scaler.patched": partial(_scaled_update, skips="elements"),
            "scaler.not_lowered": partial(_scaled_update, down=1.0),
            "scaler.never_raised": partial(_scaled_update, up=1.0),
            "scaler.not_reset": partial(_scaled_update, resets=False),
            "scaler.counts_on": partial(_scaled_update, starts_again=False),
            "scaler.one_late": partial(_scaled_update, late=1),
            "scaler.one_early": partial(_scaled_update, late=-1),
            "scaler.overlooks_nan": partial(_scaled_update, sees_nan=False),
        },
    )


def _scaled_update(
    weight: Tensor,
    gradient: Tensor,
    scale: float,
    good: int,
    lr: float,
    patience: int,
    *,
    unscaled: bool = True,
    skips: str = "all",
    down: float = 0.5,
    up: float = 2.0,
    resets: bool = True,
    starts_again: bool = True,
    late: int = 0,
    sees_nan: bool = True,
) -> list:
    """The update; the options after the arguments are the mistakes that one can make."""
    updated = weight - lr * (gradient / scale if unscaled else gradient)
    finite = gradient.isfinite() if sees_nan else ~gradient.isinf()
    if not finite.all():
        kept = {
            "all": weight,
            "nothing": updated,
            "elements": torch.where(finite, updated, weight),
        }
        return [kept[skips], down * scale, 0 if resets else good]
    if good + 1 - late >= patience:
        return [updated, up * scale, 0 if starts_again else good + 1]
    return [updated, scale, good + 1]
