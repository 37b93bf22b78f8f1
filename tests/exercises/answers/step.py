"""Answers to ``check.step``."""

import statistics
from functools import partial

from graded import Answers
from ranks import travel_by_value
from torch.nn import functional

from workbook import check

travel_by_value(__name__)


# timer(step, clock, repeats)


def times(step, clock, repeats):
    begin = clock()
    step()
    end = clock()
    return end - begin


def warm_up_was_timed_too(step, clock, repeats):
    seconds = [times(step, clock, repeats) for _ in range(repeats + 1)]
    return statistics.median(seconds[1:])


def timed(rule, warm_ups=1, more=0):
    def answer(step, clock, repeats):
        for _ in range(warm_ups):
            step()
        return rule([times(step, clock, repeats) for _ in range(repeats + more)])

    return answer


# flops(samples, side, c_in, c_out, window)


def by_factors(samples, side, c_in, c_out, window):
    return 2 * samples * side**2 * c_in * c_out * window**2


# largest_batch(num_parameters, state, kept_bytes, memory_bytes)


def fits(num_parameters, state, kept_bytes, memory_bytes):
    return max(0, (memory_bytes - 4 * num_parameters * (2 + state)) // kept_bytes)


def without(bytes_of_model):
    return lambda p, s, k, m: max(0, (m - bytes_of_model(p, s)) // k)


# accumulate(model, inputs, targets, most)


def sum_over(model, inputs, targets, divisor):
    loss = functional.cross_entropy(model(inputs), targets, reduction="sum")
    (loss / divisor).backward()


def in_splits(model, inputs, targets, most):
    for x, y in zip(inputs.split(most), targets.split(most)):
        sum_over(model, x, y, len(inputs))


def weighted(divisor, reduction="sum"):
    def answer(model, inputs, targets, most):
        parts = list(zip(inputs.split(most), targets.split(most)))
        for x, y in parts:
            loss = functional.cross_entropy(model(x), y, reduction=reduction)
            (loss / divisor(len(inputs), len(parts))).backward()

    return answer


def the_whole_batch(model, inputs, targets, most):
    sum_over(model, inputs, targets, len(inputs))


# loss_scaling(weight, gradient, scale, good, lr, patience)


def scaled(weight, gradient, scale, good, lr, patience):
    if not gradient.isfinite().all():
        return weight, scale / 2, 0
    weight = weight - lr * gradient / scale
    return (weight, 2 * scale, 0) if good + 1 == patience else (weight, scale, good + 1)


def slip(**options):
    return partial(_slips, options)


def _slips(options, weight, gradient, scale, good, lr, patience):
    due = scaled(weight, gradient, scale, good, lr, patience)
    if not gradient.isfinite().all():
        return *due[:2], good if options.get("not_reset") else 0
    updated = weight - lr * gradient / (1 if options.get("still_scaled") else scale)
    return updated, *due[1:]


ANSWERS = [
    Answers(
        check.step.timer,
        [warm_up_was_timed_too],
        [timed(statistics.median, warm_ups=0), timed(statistics.median_high), timed(str)],
    ),
    Answers(
        check.step.flops,
        [by_factors],
        [
            lambda n, s, i, o, w: n * s**2 * i * o * w**2,
            lambda n, s, i, o, w: 2 * n * s**2 * i * w**2,
            lambda n, s, i, o, w: None,
        ],
    ),
    Answers(
        check.step.largest_batch,
        [fits],
        [
            without(lambda p, s: 4 * p * (1 + s)),
            without(lambda p, s: 4 * s * p),
            lambda p, s, k, m: fits(p, s, k, m - 1),
        ],
    ),
    Answers(
        check.step.accumulate,
        [in_splits],
        [weighted(lambda n, parts: parts, "mean"), the_whole_batch],
    ),
    Answers(
        check.step.loss_scaling,
        [scaled],
        [slip(still_scaled=True), slip(not_reset=True)],
    ),
]
