"""Page 01: time a step, count operations and bytes, cut the batch, scale the loss.

They need no ranks. Symbols: n samples.
"""

import statistics
from collections.abc import Callable
from math import inf, nan

import torch
from torch import Tensor, nn
from torch.nn import functional

from workbook.exercises.ddp import flat_gradients, gradients_left
from workbook.exercises.grader import Wrong, judged, solved
from workbook.exercises.grader.compare import agree, beside, fit, short
from workbook.exercises.grader.exercise import random_tensor, with_parameters
from workbook.exercises.grader.judge_values import in_words, made_of

# Seconds of the simulated steps: the first is cold, one in five is disturbed.
_COLD_S = 0.024
_WARM_S = (0.0022, 0.002, 0.0026, 0.012, 0.0024)


@judged("step, clock, repeats", (7,), (4,), (1,))
def timer(fn: Callable, repeats: int) -> Wrong | None:
    """Grade ``fn(step, clock, repeats)``: the median seconds of ``repeats`` steps, warmed up."""
    seconds = []

    def step() -> None:
        number = len(seconds)
        warm_s = _WARM_S[number % len(_WARM_S)] + 0.00002 * number
        seconds.append(warm_s if number else _COLD_S)

    median = fit(fn(step, lambda: 41.5 + sum(seconds), repeats), 0.0)
    if len(seconds) != repeats + 1:
        return Wrong(f"step was called {len(seconds)} times, expected one more than the repeats")
    timed = seconds[-repeats:]
    expected = statistics.median(timed)
    if agree(median, expected):
        return None
    text = f"the function returned {beside(median, expected)} seconds, the median of the repeats"
    mistakes = {
        "the mean": statistics.mean(timed),
        "the shortest": min(timed),
        "the higher of the two in the middle": statistics.median_high(timed),
        "the lower of the two in the middle": statistics.median_low(timed),
        "the median with the warm-up in it": statistics.median(seconds),
    }
    for name, wrong in mistakes.items():
        if agree(median, wrong):
            text += f"\nthat is {name}"
            break
    return Wrong(text)


# samples, side, c_in, c_out, window; the second has more operations than an int32 counts
_CONVOLUTIONS = ((64, 8, 1, 32, 3), (256, 224, 64, 64, 3), (1, 5, 3, 2, 1), (7, 6, 2, 5, 5))


@solved(
    *_CONVOLUTIONS,
    mistakes={
        "a multiply-add counts as two": lambda count, *conv: count(*conv) // 2,
        "padded, the output has as many pixels as the input": (
            lambda count, n, side, c_in, c_out, w: count(n, side - w + 1, c_in, c_out, w)
        ),
    },
)
def flops(samples: int, side: int, c_in: int, c_out: int, window: int) -> int:
    """Grade ``fn(samples, side, c_in, c_out, window)``: the operations of a convolution.

    Images [samples, c_in, side, side], output [samples, c_out, side, side].
    """
    return 2 * samples * side**2 * c_in * c_out * window**2


# num_parameters, state, kept_bytes, memory_bytes; the last but one is too small for any sample
_MEMORIES = (
    *((29_066, 1, 26_928, 2**20), (29_066, 0, 26_928, 2**20), (1_000, 2, 100, 26_000)),
    *((1_000, 2, 100, 25_999), (1_000, 1, 7, 12_000), (1_000_000, 2, 100, 2**20)),
    (3_000_000_000, 2, 100_003, 2**37 + 1),
)


@solved(
    *_MEMORIES,
    mistakes={
        "the gradients are missing": lambda largest, p, s, k, m: largest(p, s - 1, k, m),
        "the optimizer's numbers take 4 bytes each, too": (
            lambda largest, p, s, k, m: int(largest(p, s / 4, k, m))
        ),
        "a part of a sample does not fit: round down": (
            lambda largest, p, s, k, m: max(0, round((m - 4 * (2 + s) * p) / k))
        ),
    },
)
def largest_batch(num_parameters: int, state: int, kept_bytes: int, memory_bytes: int) -> int:
    """Grade ``fn(num_parameters, state, kept_bytes, memory_bytes)``: the largest batch that fits.

    A parameter takes 4 bytes, its gradient as many, and the optimizer keeps ``state`` numbers of 4
    bytes for it; a sample keeps ``kept_bytes`` for backward. 0 if not even one sample fits.
    """
    return max(0, (memory_bytes - 4 * (2 + state) * num_parameters) // kept_bytes)


def _model() -> nn.Sequential:
    return with_parameters(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), 1).double()


@judged("model, inputs, targets, most", (10, 4), (12, 4), (7, 3), (3, 8), (5, 1))
def accumulate(fn: Callable, n: int, most: int) -> Wrong | None:
    """Grade ``fn(model, inputs, targets, most)``: gradients of a batch, in micro-batches.

    ``inputs`` [n, 6], ``targets`` [n]. ``grad`` of each parameter has to be the gradient of the
    mean cross-entropy over all n; a micro-batch has ``most`` samples at most.
    """
    inputs = random_tensor(n, n, 6).double()
    targets = torch.arange(n) ** 2 % 3
    layers = _model()
    order = []  # F for each forward, B for each backward
    sizes = []

    def note(module: nn.Module, given: tuple, output: Tensor) -> None:
        order.append("F")
        sizes.append(len(output))
        if output.requires_grad:
            output.register_hook(lambda gradient: order.append("B"))

    layers.register_forward_hook(note)
    with torch.enable_grad():
        fn(layers, inputs.clone(), targets.clone(), most)
    if max(sizes, default=0) > most:
        return Wrong(f"a micro-batch has {max(sizes)} samples, {most} at most fit")
    if sum(sizes) != n:
        return Wrong(f"the model ran on {sum(sizes)} of {n} samples, in micro-batches of {sizes}")
    if "FF" in "".join(order):
        return Wrong("two micro-batches are kept: backward runs before the next forward")
    gradient = gradients_left([*layers.parameters()], [*_model().parameters()])
    if isinstance(gradient, Wrong):
        return gradient
    sums = {}
    for x, y in zip(inputs.split(sizes), targets.split(sizes)):
        layers = _model()
        functional.cross_entropy(layers(x), y, reduction="sum").backward()
        sums[f"micro-batch {len(sums)}'s sum"] = flat_gradients(layers.parameters())
    total = torch.stack([*sums.values()]).sum(0)
    if agree(gradient, total / n):
        return None
    words = in_words(made_of(n * gradient, sums)) or short(n * gradient)
    expected = in_words(dict.fromkeys(sums, 1))
    text = f"the gradient is ({words}) / {n}, expected ({expected}) / {n}"
    of_means = sum(total / size for total, size in zip(sums.values(), sizes))
    if agree(gradient, of_means / len(sizes)):
        text += "\nthat is the mean of the micro-batches' means"
    elif agree(gradient, of_means):
        text += "\nthat is the sum of the micro-batches' means"
    elif agree(gradient, total):
        text += f"\nthe sum over the samples is not divided by {n}"
    elif agree(n * gradient, [*sums.values()][-1]):
        text += "\nonly the last micro-batch counts: gradients have to add up"
    return Wrong(text)


# gradient, scale, good
_UPDATES: tuple[tuple[list[float], float, int], ...] = (
    *(([4.0, -8.0, 2.0], 4.0, 0), ([4.0, inf, 2.0], 4.0, 1), ([4.0, -inf, inf], 4.0, 2)),
    *(([nan, -8.0, 2.0], 1024.0, 1), ([4.0, -8.0, 2.0], 1024.0, 2), ([4.0, -inf, 2.0], 8.0, 1)),
    # Finite, though their sum is not; a scale below 1.
    *(([3e38, 2e38, 0.0], 8.0, 1), ([4.0, -8.0, inf], 0.25, 0), ([2.0, 1.0, -0.5], 0.25, 2)),
)
_WEIGHT = torch.tensor([1.0, 2.0, 3.0])


@solved(
    *(
        (_WEIGHT, torch.tensor(gradient), scale, good, 0.5, 3)
        for gradient, scale, good in _UPDATES
    ),
    mistakes={
        "the scale doubles with the update that makes good equal to patience": (
            lambda update, *given: update(*given[:-1], given[-1] + 1)
        ),
        "divide by the scale as given, before it doubles": lambda update, w, g, scale, *rest: [
            update(w, g, max(scale, update(w, g, scale, *rest)[1]), *rest)[0],
            *update(w, g, scale, *rest)[1:],
        ],
    },
)
def loss_scaling(
    weight: Tensor, gradient: Tensor, scale: float, good: int, lr: float, patience: int
) -> list:
    """Grade ``fn(weight, gradient, scale, good, lr, patience)``: one update with loss scaling.

    ``gradient`` [N] is ``scale`` times the gradient of the loss; ``good`` counts the updates since
    the scale last changed. Expected is (weight, scale, good).
    """
    if not gradient.isfinite().all():
        return [weight, scale / 2, 0]
    weight = weight - lr * gradient / scale
    if good + 1 >= patience:
        return [weight, 2 * scale, 0]
    return [weight, scale, good + 1]
