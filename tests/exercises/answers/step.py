"""Answers to ``check.step``."""

import math
import statistics
from functools import partial

import numpy as np
import torch
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


def by_median(step, clock, repeats):
    step()
    return statistics.median([times(step, clock, repeats) for _ in range(repeats)])


def by_torch(step, clock, repeats):
    """The lower of two middle ones."""
    step()
    return torch.tensor([times(step, clock, 1) for _ in range(repeats)]).double().median()


def by_numpy(step, clock, repeats):
    for _ in range(3):
        step()
    marks = [clock()]
    for _ in range(repeats):
        step()
        marks.append(clock())
    return np.median(np.diff(marks))


def by_sorting(*, repeats, clock, step):
    step()
    seconds = sorted(times(step, clock, repeats) for _ in range(repeats))
    return seconds[len(seconds) // 2]


def recursively(step, clock, repeats, seconds=()):
    if not seconds:
        step()
    seconds = (*seconds, times(step, clock, repeats))
    if len(seconds) < repeats:
        return recursively(step, clock, repeats, seconds)
    return statistics.median_low(seconds)


def warm_up_was_timed_too(step, clock, repeats):
    seconds = [times(step, clock, repeats) for _ in range(repeats + 1)]
    return statistics.median_high(seconds[1:])


def timed(rule, warm_ups=1, more=0):
    def answer(step, clock, repeats):
        for _ in range(warm_ups):
            step()
        return rule([times(step, clock, repeats) for _ in range(repeats + more)])

    return answer


def all_at_once(step, clock, repeats):
    step()
    begin = clock()
    for _ in range(repeats):
        step()
    return (clock() - begin) / repeats


TIMER = [
    (timed(statistics.median, warm_ups=0), "timer.no_warm_up"),
    (timed(statistics.median, warm_ups=0, more=1), "timer.cold"),
    (timed(statistics.median, warm_ups=40), "timer.calls"),
    (timed(statistics.fmean), "timer.mean"),
    (all_at_once, "timer.mean"),
    (timed(min), "timer.best"),
    (timed(sum), "timer.total"),
    (timed(lambda seconds: 1e3 * statistics.median(seconds)), "timer.milliseconds"),
    (timed(lambda seconds: seconds[-1]), "timer.one"),
    (timed(max), "timer.other"),
    (timed(str), "timer.kind"),
]


# flops(samples, side, c_in, c_out, window)


def by_factors(samples, side, c_in, c_out, window):
    return 2 * samples * side**2 * c_in * c_out * window**2


def by_product(samples, side, c_in, c_out, window):
    return math.prod([2, samples, side, side, c_in, c_out, window, window])


def by_loops(samples, side, c_in, c_out, window):
    outputs = sum(1 for _ in range(samples * c_out) for _ in range(side**2))
    return outputs * (c_in * window**2) * 2


def as_a_tensor(samples, side, c_in, c_out, window):
    return 2 * torch.empty(samples, c_out, side, side).numel() * torch.tensor(c_in * window**2)


def with_the_counter(samples, side, c_in, c_out, window):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        images, weight = (
            torch.zeros(samples, c_in, side, side),
            torch.zeros(c_out, c_in, window, window),
        )
        functional.conv2d(images, weight, padding=window // 2)
    return counter.get_total_flops()


def by_keyword(*, window, c_out, c_in, side, samples):
    return float(by_factors(samples, side, c_in, c_out, window))


def in_float(*shape):
    return np.int64(by_factors(*shape))


FLOPS = [
    (lambda n, s, i, o, w: n * s**2 * i * o * w**2, "flops.multiply_adds"),
    (lambda n, s, i, o, w: 2 * n * s**2 * i * o * w, "flops.window"),
    (lambda n, s, i, o, w: 2 * n * s * i * o * w**2, "flops.side"),
    (lambda n, s, i, o, w: 2 * n * s**2 * o * w**2, "flops.inputs"),
    (lambda n, s, i, o, w: 2 * n * s**2 * i * w**2, "flops.outputs"),
    (lambda n, s, i, o, w: 2 * s**2 * i * o * w**2, "flops.samples"),
    (lambda n, s, i, o, w: 2 * n * s**2 * (i + o) * w**2, "flops.channels_added"),
    (lambda n, s, i, o, w: (2 * i * w**2 + 1) * n * s**2 * o, "answer.wrong"),
    (lambda n, s, i, o, w: None, "answer.nothing"),
]


# largest_batch(num_parameters, state, kept_bytes, memory_bytes)


def fits(num_parameters, state, kept_bytes, memory_bytes):
    return max(0, (memory_bytes - 4 * num_parameters * (2 + state)) // kept_bytes)


def by_trying(num_parameters, state, kept_bytes, memory_bytes):
    used, samples = sum([4 * num_parameters] * (2 + state)), 0
    while used + (samples + 1) * kept_bytes <= memory_bytes:
        samples += 1
    return samples


def by_floor(num_parameters, state, kept_bytes, memory_bytes):
    left = memory_bytes - 4 * (num_parameters + num_parameters + state * num_parameters)
    return math.floor(left / kept_bytes) if left > 0 else 0


def by_divmod(*, memory_bytes, kept_bytes, state, num_parameters):
    whole, _ = divmod(memory_bytes - (8 + 4 * state) * num_parameters, kept_bytes)
    return np.clip(whole, 0, None)


def in_a_tensor(num_parameters, state, kept_bytes, memory_bytes):
    left = torch.tensor(memory_bytes - 4 * num_parameters * (2 + state))
    return (left // kept_bytes).clamp(min=0)


def by_halving(num_parameters, state, kept_bytes, memory_bytes):
    low, high = 0, memory_bytes // kept_bytes
    while low < high:
        middle = (low + high + 1) // 2
        need = 4 * num_parameters * (2 + state) + middle * kept_bytes
        low, high = (middle, high) if need <= memory_bytes else (low, middle - 1)
    return low


def without(bytes_of_model):
    return lambda p, s, k, m: max(0, (m - bytes_of_model(p, s)) // k)


LARGEST = [
    (without(lambda p, s: 4 * p * (1 + s)), "memory.no_gradients"),
    (without(lambda p, s: 8 * p), "memory.no_state"),
    (without(lambda p, s: (2 + s) * p), "memory.numbers"),
    (without(lambda p, s: 0), "memory.kept_alone"),
    (without(lambda p, s: 4 * s * p), "memory.state_alone"),
    (lambda p, s, k, m: (m - 4 * p * (2 + s)) // k, "memory.negative"),
    (lambda p, s, k, m: max(0, math.ceil((m - 4 * p * (2 + s)) / k)), "memory.rounded_up"),
    (lambda p, s, k, m: max(0.0, (m - 4 * p * (2 + s)) / k), "memory.fraction"),
    (lambda p, s, k, m: fits(p, s, k, m - 1), "answer.wrong"),
]


# accumulate(model, inputs, targets, most)


def sum_over(model, inputs, targets, divisor):
    loss = functional.cross_entropy(model(inputs), targets, reduction="sum")
    (loss / divisor).backward()


def in_splits(model, inputs, targets, most):
    for x, y in zip(inputs.split(most), targets.split(most)):
        sum_over(model, x, y, len(inputs))


def with_weights(model, inputs, targets, most):
    """Means, weighted by their share of the batch."""
    for begin in range(0, len(inputs), most):
        part = slice(begin, begin + most)
        loss = functional.cross_entropy(model(inputs[part]), targets[part])
        (loss * len(targets[part]) / len(inputs)).backward()


def divides_at_the_end(model, inputs, targets, most):
    model.zero_grad()
    for x, y in zip(inputs.split(most), targets.split(most)):
        sum_over(model, x, y, 1)
    for parameter in model.parameters():
        parameter.grad /= len(inputs)
    return model


def evenly(model, inputs, targets, most):
    parts = math.ceil(len(inputs) / most)
    for x, y in zip(inputs.tensor_split(parts), targets.tensor_split(parts)):
        sum_over(model, x, y, len(inputs))


def one_by_one(*, most, targets, inputs, model):
    for place in torch.randperm(len(inputs), generator=torch.Generator().manual_seed(1)).sort()[0]:
        sum_over(model, inputs[place].unsqueeze(0), targets[place].unsqueeze(0), len(inputs))


def by_autograd(model, inputs, targets, most):
    total = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for x, y in zip(inputs.split(most), targets.split(most)):
        loss = functional.cross_entropy(model(x), y, reduction="sum")
        for one, more in zip(total, torch.autograd.grad(loss, list(model.parameters()))):
            one += more
    for parameter, one in zip(model.parameters(), total):
        parameter.grad = one / len(inputs)


def by_the_rest(model, inputs, targets, most, samples=None):
    """Recursion over what is left."""
    samples = samples or len(inputs)
    sum_over(model, inputs[:most], targets[:most], samples)
    if len(inputs) > most:
        by_the_rest(model, inputs[most:], targets[most:], most, samples)


def weighted(divisor, reduction="sum", forget=False):
    def answer(model, inputs, targets, most):
        parts = list(zip(inputs.split(most), targets.split(most)))
        for x, y in parts:
            if forget:
                model.zero_grad()
            loss = functional.cross_entropy(model(x), y, reduction=reduction)
            (loss / divisor(len(inputs), len(parts))).backward()

    return answer


def the_whole_batch(model, inputs, targets, most):
    sum_over(model, inputs, targets, len(inputs))


def drops_the_rest(model, inputs, targets, most):
    size = min(most, len(inputs))
    for begin in range(0, len(inputs) - size + 1, size):
        sum_over(model, inputs[begin : begin + size], targets[begin : begin + size], len(inputs))


def adds_up_the_losses(model, inputs, targets, most):
    parts = zip(inputs.split(most), targets.split(most))
    losses = [functional.cross_entropy(model(x), y, reduction="sum") for x, y in parts]
    (sum(losses) / len(inputs)).backward()


def forward_alone(model, inputs, targets, most):
    with torch.no_grad():
        for x in inputs.split(most):
            model(x)


def nothing_at_all(model, inputs, targets, most):
    pass


def negative(model, inputs, targets, most):
    weighted(lambda n, parts: -n)(model, inputs, targets, most)


ACCUMULATE = [
    (weighted(lambda n, parts: parts, "mean"), "accumulate.mean_of_means"),
    (weighted(lambda n, parts: 1, "mean"), "accumulate.sum_of_means"),
    (weighted(lambda n, parts: 1), "accumulate.sum"),
    (weighted(lambda n, parts: parts), "accumulate.by_parts"),
    (weighted(lambda n, parts: n, forget=True), "accumulate.last"),
    (weighted(lambda n, parts: 1, "mean", forget=True), "accumulate.last"),
    (the_whole_batch, "accumulate.too_large"),
    (drops_the_rest, "accumulate.samples"),
    (adds_up_the_losses, "accumulate.all_kept"),
    (forward_alone, "accumulate.none"),
    (nothing_at_all, "accumulate.no_forward"),
    (negative, "accumulate.other"),
]


# loss_scaling(weight, gradient, scale, good, lr, patience)


def scaled(weight, gradient, scale, good, lr, patience):
    if not gradient.isfinite().all():
        return weight, scale / 2, 0
    weight = weight - lr * gradient / scale
    return (weight, 2 * scale, 0) if good + 1 == patience else (weight, scale, good + 1)


def in_a_list(weight, gradient, scale, good, lr, patience):
    return [*scaled(weight, gradient, scale, good, lr, patience)]


def in_place(weight, gradient, scale, good, lr, patience):
    if torch.isfinite(gradient).all():
        weight.sub_(gradient, alpha=lr / scale)
        good += 1
        scale, good = (scale * 2, 0) if good >= patience else (scale, good)
        return weight, torch.tensor(scale), torch.tensor(good)
    return weight, torch.tensor(scale * 0.5), torch.tensor(0)


def by_its_sum(weight, gradient, scale, good, lr, patience):
    if math.isnan(sum(0 * gradient.tolist()[i] for i in range(len(gradient)))):
        return weight.numpy(), scale / 2, 0
    good = (good + 1) % patience
    return (weight - gradient * (lr / scale)).numpy(), scale if good else scale * 2, good


def with_numpy(*, patience, lr, good, scale, gradient, weight):
    if not np.isfinite(gradient.numpy()).all():
        yield from (weight.tolist(), scale / 2, 0)
        return
    raised = good + 1 == patience
    yield (weight - lr * gradient / scale).tolist()
    yield scale * (2 if raised else 1)
    yield 0 if raised else good + 1


def by_its_largest(weight, gradient, scale, good, lr, patience):
    if gradient.abs().max().item() < float("inf"):
        return scaled(weight, gradient, scale, good, lr, patience)
    return weight.clone(), scale / 2, 0 * good


def unscales_first(weight, gradient, scale, good, lr, patience):
    gradient = gradient.double() / scale
    if gradient.isinf().any() or gradient.isnan().any():
        return weight, scale / 2, 0
    grows = good == patience - 1
    return weight - lr * gradient, scale * 2**grows, (good + 1) * (not grows)


def slip(**options):
    return partial(_slips, options)


def _slips(options, weight, gradient, scale, good, lr, patience):
    """A copy of what an answer does, with one slip."""
    finite = ~gradient.isinf() if options.get("infinity_only") else gradient.isfinite()
    updated = weight - lr * gradient / (1 if options.get("still_scaled") else scale)
    if not finite.all():
        kept = updated if options.get("anyway") else weight
        kept = torch.where(finite, updated, weight) if options.get("patched") else kept
        scale = scale if options.get("stays") else scale / 2
        return kept, scale, good if options.get("not_reset") else 0
    if good + 1 >= patience + options.get("late", 0):
        scale = scale if options.get("never_up") else scale * 2
        return updated, scale, good + 1 if options.get("counts_on") else 0
    return updated, scale, good + 1


SCALER = [
    (slip(still_scaled=True), "scaler.still_scaled"),
    (slip(anyway=True), "scaler.updated_anyway"),
    (slip(patched=True), "scaler.patched"),
    (slip(stays=True), "scaler.not_lowered"),
    (slip(never_up=True), "scaler.never_raised"),
    (slip(not_reset=True), "scaler.not_reset"),
    (slip(counts_on=True), "scaler.counts_on"),
    (slip(late=1), "scaler.one_late"),
    (slip(late=-1), "scaler.one_early"),
    (slip(infinity_only=True), "scaler.overlooks_nan"),
    (slip(stays=True, not_reset=True), "answer.wrong"),
]


ANSWERS = [
    Answers(
        check.step.timer,
        [by_median, by_torch, by_numpy, by_sorting, recursively, warm_up_was_timed_too],
        TIMER,
    ),
    Answers(
        check.step.flops,
        [*(by_factors, by_product, by_loops, as_a_tensor, by_keyword, in_float), with_the_counter],
        FLOPS,
    ),
    Answers(
        check.step.largest_batch,
        [fits, by_trying, by_floor, by_divmod, in_a_tensor, by_halving],
        LARGEST,
    ),
    Answers(
        check.step.accumulate,
        [
            *(in_splits, with_weights, divides_at_the_end, evenly),
            *(one_by_one, by_autograd, by_the_rest),
        ],
        ACCUMULATE,
    ),
    Answers(
        check.step.loss_scaling,
        [scaled, in_a_list, in_place, by_its_sum, with_numpy, by_its_largest, unscales_first],
        SCALER,
    ),
]
