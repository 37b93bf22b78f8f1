"""More answers to ``check.data_parallel``: right ones in unusual forms, wrong ones."""

import asyncio
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce as fold
from itertools import pairwise
from multiprocessing.pool import ThreadPool

import numpy as np
import torch
from graded import Answers
from ranks import travel_by_value

from answers.data_parallel import adds
from workbook import check

travel_by_value(__name__)


# scatter(inputs, num_devices)


def larger_parts_last(inputs, num_devices):
    parts = min(num_devices, len(inputs))
    size, more = divmod(len(inputs), parts)
    return inputs.split([size] * (parts - more) + [size + 1] * more)


def cuts_at_rounded_places(inputs, num_devices):
    parts = min(num_devices, len(inputs))
    cuts = [round(index * len(inputs) / parts) for index in range(parts + 1)]
    return tuple(inputs[start:end] for start, end in pairwise(cuts))


def yields_parts(inputs, num_devices):
    left = inputs
    for devices in range(min(num_devices, len(inputs)), 0, -1):
        size = -(-len(left) // devices)
        yield left[:size]
        left = left[size:]


def halves(inputs, num_devices):
    """Recursively: as many devices as possible to the left half."""
    parts = min(num_devices, len(inputs))
    if parts == 1:
        return [inputs]
    left = parts // 2
    cut = len(inputs) * left // parts
    return halves(inputs[:cut], left) + halves(inputs[cut:], parts - left)


def with_numpy(inputs, num_devices):
    return np.array_split(inputs.numpy(), min(num_devices, len(inputs)))


def narrows(inputs, num_devices):
    sizes = torch.zeros(num_devices, dtype=torch.long)
    for sample in range(len(inputs)):
        sizes[sample % num_devices] += 1
    starts = sizes.cumsum(0) - sizes
    return [inputs.narrow(0, start, size) for start, size in zip(starts, sizes) if size > 0]


def leaves_out_empty_parts(inputs, num_devices):
    return list(filter(len, inputs.tensor_split(num_devices)))


def selects_by_index(inputs, num_devices):
    places = torch.arange(len(inputs)) * min(num_devices, len(inputs)) // len(inputs)
    return [inputs.index_select(0, (places == p).nonzero().flatten()) for p in places.unique()]


def for_four_devices(inputs, num_devices):
    return list(inputs.tensor_split(min(4, len(inputs))))


def flat_parts(inputs, num_devices):
    """Right only for samples of one number."""
    return list(inputs.flatten().tensor_split(min(num_devices, len(inputs))))


def drops_empty_chunks(inputs, num_devices):
    return list(inputs.split(-(-len(inputs) // num_devices)))


def float_parts(inputs, num_devices):
    return [part.float() for part in inputs.tensor_split(min(num_devices, len(inputs)))]


def ends_with_the_first(inputs, num_devices):
    return list(inputs.tensor_split(min(num_devices, len(inputs))))[::-1]


def one_tensor(inputs, num_devices):
    return inputs


def overlapping(inputs, num_devices):
    size = -(-len(inputs) // num_devices)
    parts = min(num_devices, len(inputs))
    starts = [index * (len(inputs) - size) // max(parts - 1, 1) for index in range(parts)]
    return [inputs[start : start + size] for start in starts]


def two_samples_each(inputs, num_devices):
    return list(inputs.split(2))[:num_devices]


RIGHT_PARTS = [
    larger_parts_last,
    cuts_at_rounded_places,
    yields_parts,
    halves,
    with_numpy,
    narrows,
    leaves_out_empty_parts,
    selects_by_index,
]
WRONG_PARTS = [
    (for_four_devices, "scatter_fairly.count", "num_devices is 3: there are 4 parts"),
    (flat_parts, "scatter_fairly.samples"),
    (drops_empty_chunks, "scatter_fairly.chunk"),
    (float_parts, "scatter_fairly.dtype"),
    (ends_with_the_first, "scatter_fairly.samples", "not scatter_fairly.in_turn"),
    (one_tensor, "scatter_fairly.kind"),
    (overlapping, "scatter_fairly.samples"),
    (two_samples_each, "scatter_fairly.count", "not scatter_fairly.chunk"),
    (lambda inputs, num_devices: None, "scatter_fairly.kind"),
]


# parallel_apply(functions, inputs)


def under(mode, function, argument):
    with torch.set_grad_enabled(mode):
        return function(argument)


def with_futures(functions, inputs):
    mode, futures = torch.is_grad_enabled(), []
    for function, argument in zip(functions, inputs):
        future = Future()
        futures.append(future)

        def work(future=future, function=function, argument=argument):
            try:
                future.set_result(under(mode, function, argument))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=work).start()
    return tuple(future.result() for future in futures)


def with_a_thread_pool(functions, inputs):
    mode = torch.is_grad_enabled()
    with ThreadPool(len(functions)) as pool:
        return pool.starmap(lambda f, x: under(mode, f, x), zip(functions, inputs))


def with_asyncio(functions, inputs):
    mode = torch.is_grad_enabled()

    async def all_of_them():
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(len(functions)))
        calls = (asyncio.to_thread(under, mode, f, x) for f, x in zip(functions, inputs))
        return await asyncio.gather(*calls)

    return asyncio.run(all_of_them())


class Worker(threading.Thread):
    def __init__(self, function, argument):
        super().__init__()
        self.call, self.mode = (function, argument), torch.is_grad_enabled()
        self.result = self.error = None
        self.start()

    def run(self):
        torch.set_grad_enabled(self.mode)
        function, argument = self.call
        try:
            self.result = function(argument)
        except Exception as error:
            self.error = error

    def join(self, timeout=None):
        super().join(timeout)
        if self.error is not None:
            raise self.error
        return self.result


def with_a_subclass(functions, inputs):
    return map(Worker.join, [*map(Worker, functions, inputs)])


def through_a_queue(functions, inputs):
    done, mode = queue.Queue(), torch.is_grad_enabled()

    def work(place):
        try:
            done.put((place, under(mode, functions[place], inputs[place]), None))
        except Exception as error:
            done.put((place, None, error))

    for place in range(len(functions)):
        threading.Thread(target=work, args=(place,), daemon=True).start()
    ended = sorted((done.get() for _ in functions), key=lambda entry: entry[0])
    for _, _, error in ended:
        if error:
            raise error
    return np.array([result for _, result, _ in ended])


def the_last_in_the_caller(functions, inputs):
    mode = torch.is_grad_enabled()
    with ThreadPoolExecutor(len(functions)) as pool:
        calls = [pool.submit(under, mode, f, x) for f, x in zip(functions[:-1], inputs)]
        last = functions[-1](inputs[-1])
        return [*(call.result() for call in calls), last]


def at_most_four(functions, inputs):
    mode = torch.is_grad_enabled()
    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(lambda f, x: under(mode, f, x), functions, inputs))


def raises_a_new_one(functions, inputs):
    try:
        return with_futures(functions, inputs)
    except Exception as error:
        raise type(error)("a thread failed") from error


def returns_the_error(functions, inputs):
    mode = torch.is_grad_enabled()

    def work(function, argument):
        try:
            return under(mode, function, argument)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(work, functions, inputs))


class KeepsTheFirstMode:
    mode = None

    def __call__(self, functions, inputs):
        if self.mode is None:
            self.mode = torch.is_grad_enabled()
        with ThreadPoolExecutor(len(functions)) as pool:
            return list(pool.map(lambda f, x: under(self.mode, f, x), functions, inputs))


def switches_the_caller(functions, inputs):
    """The caller's mode does not reach new threads."""
    with ThreadPoolExecutor(len(functions)) as pool, torch.set_grad_enabled(False):
        return list(pool.map(lambda f, x: f(x), functions, inputs))


def pairs_each_with_each(functions, inputs):
    mode = torch.is_grad_enabled()
    with ThreadPoolExecutor(len(functions)) as pool:
        return list(pool.map(lambda f: under(mode, f, inputs[0]), functions))


def catches_key_errors_alone(functions, inputs):
    mode, errors, results = torch.is_grad_enabled(), [], [None] * len(functions)

    def work(place):
        try:
            results[place] = under(mode, functions[place], inputs[place])
        except KeyError as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


RIGHT_THREADS = [
    with_futures,
    with_a_thread_pool,
    with_asyncio,
    with_a_subclass,
    through_a_queue,
    the_last_in_the_caller,
]
WRONG_THREADS = [
    (at_most_four, "threads.too_few"),
    (raises_a_new_one, "threads.other_words"),
    (returns_the_error, "threads.lost_error"),
    (KeepsTheFirstMode(), "threads.record"),
    (switches_the_caller, "threads.record"),
    (pairs_each_with_each, "threads.results", "not threads.not_waited"),
    (catches_key_errors_alone, "threads.lost_error", "functions[0] raised RuntimeError"),
    (lambda functions, inputs: None, "threads.results", "not threads.one_by_one"),
]


# reduce(gradients)


def folds(gradients):
    def plus(one, other):
        if one is None or other is None:
            return one if other is None else other
        return one + other

    return tuple(fold(plus, column) for column in zip(*gradients))


def yields_sums(gradients):
    for column in zip(*gradients):
        there = [gradient for gradient in column if gradient is not None]
        yield torch.stack(there).sum(0) if there else None


def with_numpy_sums(gradients):
    columns = ([g.numpy() for g in column if g is not None] for column in zip(*gradients))
    return [np.add.reduce(column) if column else None for column in columns]


def recursively(gradients):
    """The sum of one half of the devices, plus that of the other half."""
    if len(gradients) == 1:
        return gradients[0]
    half = len(gradients) // 2
    return folds([recursively(gradients[:half]), recursively(gradients[half:])])


def into_the_first_device(gradients):
    first = gradients[0]
    for place in range(len(first)):
        for device in gradients[1:]:
            if device[place] is not None:
                if first[place] is None:
                    first[place] = device[place].clone()
                else:
                    first[place].add_(device[place])
    return first


def in_float64_from_the_last(gradients):
    sums = {}
    for device in reversed(gradients):
        for place, gradient in enumerate(device):
            if gradient is not None:
                sums[place] = sums.get(place, 0) + gradient.double()
    return [sums[p].float() if p in sums else None for p in range(len(gradients[0]))]


def into_the_first_that_is_there(gradients):
    """Where device 0 has none, another device's gradient is changed."""
    sums = []
    for column in zip(*gradients):
        there = [gradient for gradient in column if gradient is not None]
        for gradient in there[1:]:
            there[0] += gradient
        sums.append(there[0] if there else None)
    return sums


def of_three_devices(gradients):
    return adds(gradients[:3])


def zero_is_nothing(gradients):
    return [total if total is not None and total.any() else None for total in adds(gradients)]


def in_bfloat16(gradients):
    return [None if total is None else total.bfloat16().float() for total in adds(gradients)]


def flat_sums(gradients):
    return [None if total is None else total.flatten() for total in adds(gradients)]


def skips_the_nones(gradients):
    return [total for total in adds(gradients) if total is not None]


def by_device(gradients):
    return [sum(g.sum() for g in device if g is not None) for device in gradients]


def empties_the_others(gradients):
    sums = adds(gradients)
    for device in gradients[1:]:
        for gradient in device:
            if gradient is not None:
                gradient.zero_()
    return sums


RIGHT_SUMS = [
    folds,
    yields_sums,
    with_numpy_sums,
    recursively,
    into_the_first_device,
    in_float64_from_the_last,
]
WRONG_SUMS = [
    (into_the_first_that_is_there, "sum_devices.others_changed"),
    (of_three_devices, "sum_devices.three_alone"),
    (zero_is_nothing, "sum_devices.nothing_for_zero"),
    (in_bfloat16, "sum_devices.differs"),
    (flat_sums, "sum_devices.differs"),
    (skips_the_nones, "sum_devices.kind"),
    (by_device, "sum_devices.kind"),
    (empties_the_others, "sum_devices.others_changed"),
    (lambda gradients: gradients[-1], "sum_devices.differs"),
]


ANSWERS = [
    Answers(check.data_parallel.scatter, RIGHT_PARTS, WRONG_PARTS, 1),
    Answers(check.data_parallel.parallel_apply, RIGHT_THREADS, WRONG_THREADS, 1),
    Answers(check.data_parallel.reduce, RIGHT_SUMS, WRONG_SUMS, 1),
]
