"""Page 02's checks by mutation: the references pass, and each wrong answer has its name."""

import threading
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial

import pytest
import torch
from graded import in_shared_runs
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


CHECKS = {
    "scatter": (
        splits,
        [
            (keeps_empty_parts, "a device without a sample is there, too"),
            (chunks, "torch.chunk rounds sizes up"),
            (deals_out, "samples are dealt out in turn"),
            (drops_the_rest, "samples that do not divide are dropped"),
            (gives_the_rest_to_the_last, "the last device gets all that does not divide"),
            (gives_all_to_all, "every device gets the whole batch"),
            (gives_one_each, "every sample is a part of its own"),
        ],
    ),
    "parallel_apply": (
        runs,
        [
            (uses_no_threads, "one after another in the caller's own"),
            (waits_for_each, "start all threads before you wait for one"),
            (loses_exceptions, "the exception was lost"),
            (orders_by_end, "in the order in which the threads ended"),
            (never_waits, "did all threads end before it did?"),
            (forgets_the_mode, "each begins with autograd enabled"),
            (never_records, "the caller records, and the threads do not"),
            (asks_all_but_the_first, "part 0 raised KeyError, and the caller got"),
            (raises_its_own, "the caller saw RuntimeError"),
        ],
    ),
    "reduce": (
        adds,
        [
            (takes_means, "the mean over the devices"),
            (means_of_those_there, "the mean over those devices that have a gradient"),
            (zeros_for_none, "zeros for a parameter that no device used"),
            (keeps_the_first, "device 0's own gradients alone"),
            (leaves_the_first_out, "device 0's own gradients are not in it"),
            (follows_the_first, "without a gradient on device 0 is left out"),
            (wants_all, "without a gradient on any one device is left out"),
            (stops_early, "only devices 0 and 1 are in it"),
            (adds_into_the_last, "the gradients of other devices were changed"),
            (returns_one, "a list of 4 sums is due"),
        ],
    ),
}


@pytest.fixture(scope="module")
def verdicts():
    found = {}
    for name, (right, wrong) in CHECKS.items():
        checker = getattr(check.data_parallel, name)
        for answer in (right, *(answer for answer, _ in wrong)):
            found[answer] = partial(checker, answer)
    return in_shared_runs(found)


@pytest.mark.parametrize("name", CHECKS)
def test_the_reference_passes_and_each_mistake_has_its_name(name, verdicts):
    right, wrong = CHECKS[name]
    assert verdicts[right].passed, verdicts[right]
    for answer, words in wrong:
        assert verdicts[answer].status == "not yet"
        assert words in " ".join(verdicts[answer].notes), (answer.__name__, verdicts[answer])


def test_a_stub_is_not_attempted_yet():
    def stub(*args):
        raise NotImplementedError

    for name in CHECKS:
        verdict = getattr(check.data_parallel, name)(stub)
        assert repr(verdict) == f"not attempted yet: data_parallel.{name}"
