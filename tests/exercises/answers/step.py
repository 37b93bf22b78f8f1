"""Answers to ``check.step``."""

from functools import partial
from math import inf
from statistics import median, median_high

from graded import Answers
from torch.nn import functional

from workbook import check


def timed(step, clock, repeats, rule=median, warm_ups=1):
    for _ in range(warm_ups):
        step()
    seconds = []
    for _ in range(repeats):
        begin = clock()
        step()
        seconds.append(clock() - begin)
    return rule(seconds)


def operations(samples, side, c_in, c_out, window):
    return 2 * samples * side**2 * c_in * c_out * window**2


def fits(num_parameters, state, kept_bytes, memory_bytes, numbers=2):
    return max(0, (memory_bytes - 4 * num_parameters * (numbers + state)) // kept_bytes)


def weighted(model, inputs, targets, most, divisor=lambda n, parts: n, reduction="sum"):
    parts = list(zip(inputs.split(most), targets.split(most)))
    for x, y in parts:
        loss = functional.cross_entropy(model(x), y, reduction=reduction)
        (loss / divisor(len(inputs), len(parts))).backward()


def scaled(weight, gradient, scale, good, lr, patience, reset=0):
    if not gradient.isfinite().all():
        return weight, scale / 2, good if reset is None else 0
    weight = weight - lr * gradient / scale
    return (weight, 2 * scale, 0) if good + 1 == patience else (weight, scale, good + 1)


ANSWERS = [
    Answers(
        check.step.timer,
        [timed],
        [partial(timed, warm_ups=0), partial(timed, rule=median_high), partial(timed, rule=str)],
    ),
    Answers(
        check.step.flops,
        [operations],
        [
            lambda n, s, i, o, w: operations(n, s, i, o, w) // 2,
            lambda n, s, i, o, w: 2 * n * s**2 * i * w**2,
        ],
    ),
    Answers(
        check.step.largest_batch,
        [fits],
        [
            partial(fits, numbers=1),
            partial(fits, numbers=0),
            lambda p, s, k, m: fits(p, s, k, m - 1),
        ],
    ),
    Answers(
        check.step.accumulate,
        [weighted],
        [
            partial(weighted, divisor=lambda n, parts: parts, reduction="mean"),
            partial(weighted, divisor=lambda n, parts: 1),
            lambda model, inputs, targets, most: weighted(model, inputs, targets, len(inputs)),
        ],
    ),
    Answers(
        check.step.loss_scaling,
        [scaled],
        [
            lambda w, g, *rest: scaled(w, g + 0 * g.sum(), *rest),
            partial(scaled, reset=None),
            lambda *given: scaled(*given[:-1], given[-1] + 1),
            lambda w, g, *rest: scaled(w, g.nan_to_num(nan=inf, neginf=-1.0), *rest),
        ],
    ),
]
