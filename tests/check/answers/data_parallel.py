"""Answers to ``check.data_parallel``."""

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from graded import Answers
from ranks import travel_by_value

from labkit import check

travel_by_value(__name__)


# scatter(inputs, num_devices)


def splits(inputs, num_devices):
    return list(inputs.tensor_split(min(num_devices, len(inputs))))


def keeps_empty_parts(inputs, num_devices):
    return inputs.tensor_split(num_devices)


def chunks(inputs, num_devices):
    return list(inputs.chunk(num_devices))


def deals_out(inputs, num_devices):
    return [inputs[i::num_devices] for i in range(min(num_devices, len(inputs)))]


def drops_the_rest(inputs, num_devices):
    return list(inputs.split(max(1, len(inputs) // num_devices)))[:num_devices]


def gives_the_rest_to_the_last(inputs, num_devices):
    size = len(inputs) // num_devices
    first = [inputs[i * size : (i + 1) * size] for i in range(num_devices - 1)]
    return [*first, inputs[(num_devices - 1) * size :]]


def gives_all_to_all(inputs, num_devices):
    return [inputs] * num_devices


def gives_one_each(inputs, num_devices):
    return list(inputs.split(1))


# parallel_apply(functions, inputs)


def runs(functions, inputs):
    grad = torch.is_grad_enabled()

    def with_mode(function, argument):
        with torch.set_grad_enabled(grad):
            return function(argument)

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(with_mode, functions, inputs))


def uses_no_threads(functions, inputs):
    return [function(argument) for function, argument in zip(functions, inputs)]


def in_threads(functions, inputs, wait):
    results = {}

    def work(place):
        results[place] = functions[place](inputs[place])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
        if wait == "at once":
            thread.join()
    for thread in threads if wait == "at the end" else ():
        thread.join()
    return results


def waits_for_each(functions, inputs):
    return list(in_threads(functions, inputs, "at once").values())


def loses_exceptions(functions, inputs):
    results = in_threads(functions, inputs, "at the end")
    return [results.get(place) for place in range(len(functions))]


def orders_by_end(functions, inputs):
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(f, x) for f, x in zip(functions, inputs)]
        return [future.result() for future in as_completed(futures)]


def never_waits(functions, inputs):
    results = in_threads(functions, inputs, "never")
    return [results.get(place) for place in range(len(functions))]


def forgets_the_mode(functions, inputs):
    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(lambda f, x: f(x), functions, inputs))


def never_records(functions, inputs):
    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(torch.no_grad()(lambda f, x: f(x)), functions, inputs))


def asks_all_but_the_first(functions, inputs):
    results = in_threads(functions, inputs, "at the end")
    errors = set(range(1, len(functions))) - results.keys()
    if errors:
        raise KeyError(errors)
    return [results.get(place) for place in range(len(functions))]


def raises_its_own(functions, inputs):
    try:
        return runs(functions, inputs)
    except KeyError:
        raise RuntimeError("a thread failed") from None


# reduce(gradients)


def adds(gradients):
    sums = []
    for column in zip(*gradients):
        there = [gradient for gradient in column if gradient is not None]
        sums.append(sum(there[1:], there[0]) if there else None)
    return sums


def takes_means(gradients):
    return [total if total is None else total / len(gradients) for total in adds(gradients)]


def means_of_those_there(gradients):
    counts = [sum(g is not None for g in column) for column in zip(*gradients)]
    return [total if total is None else total / n for n, total in zip(counts, adds(gradients))]


def zeros_for_none(gradients):
    return [torch.zeros(4) if total is None else total for total in adds(gradients)]


def keeps_the_first(gradients):
    return gradients[0]


def leaves_the_first_out(gradients):
    return adds(gradients[1:])


def follows_the_first(gradients):
    return [None if g is None else total for g, total in zip(gradients[0], adds(gradients))]


def wants_all(gradients):
    columns = list(zip(*gradients))
    whole = [all(g is not None for g in column) for column in columns]
    return [total if there else None for there, total in zip(whole, adds(gradients))]


def stops_early(gradients):
    return adds(gradients[:2])


def adds_into_the_last(gradients):
    sums = adds(gradients)
    for gradient, total in zip(gradients[-1], sums):
        if gradient is not None:
            gradient.copy_(total)
    return sums


def returns_one(gradients):
    return adds(gradients)[0]


ANSWERS = [
    Answers(
        check.data_parallel.scatter,
        [splits],
        [
            (keeps_empty_parts, "scatter_fairly.empty_device"),
            (chunks, "scatter_fairly.chunk"),
            (deals_out, "scatter_fairly.in_turn"),
            (drops_the_rest, "scatter_fairly.dropped"),
            (gives_the_rest_to_the_last, "scatter_fairly.rest_to_last"),
            (gives_all_to_all, "scatter_fairly.whole_batch"),
            (gives_one_each, "scatter_fairly.one_each"),
        ],
    ),
    Answers(
        check.data_parallel.parallel_apply,
        [runs],
        [
            (uses_no_threads, "threads.none"),
            (waits_for_each, "threads.one_by_one"),
            (loses_exceptions, "threads.lost_error"),
            (orders_by_end, "threads.order"),
            (never_waits, "threads.not_waited"),
            (forgets_the_mode, "threads.record"),
            (never_records, "threads.do_not_record"),
            (asks_all_but_the_first, "threads.other_words"),
            (raises_its_own, "threads.other_error"),
        ],
    ),
    Answers(
        check.data_parallel.reduce,
        [adds],
        [
            (takes_means, "sum_devices.mean"),
            (means_of_those_there, "sum_devices.mean_of_some"),
            (zeros_for_none, "sum_devices.zeros"),
            (keeps_the_first, "sum_devices.first_alone"),
            (leaves_the_first_out, "sum_devices.first_missing"),
            (follows_the_first, "sum_devices.follows_first"),
            (wants_all, "sum_devices.wants_all"),
            (stops_early, "sum_devices.two_alone"),
            (adds_into_the_last, "sum_devices.others_changed"),
            (returns_one, "sum_devices.kind"),
        ],
    ),
]
