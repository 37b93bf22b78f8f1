"""More answers to ``check.data_parallel``: right ones in unusual forms, wrong ones."""

import threading
from concurrent.futures import Future
from functools import reduce as fold

import torch
from graded import Answers
from ranks import travel_by_value

from workbook import check

travel_by_value(__name__)


# scatter(inputs, num_devices)


def larger_parts_last(inputs, num_devices):
    parts = min(num_devices, len(inputs))
    size, more = divmod(len(inputs), parts)
    return inputs.split([size] * (parts - more) + [size + 1] * more)


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


# reduce(gradients)


def folds(gradients):
    def plus(one, other):
        if one is None or other is None:
            return one if other is None else other
        return one + other

    return tuple(fold(plus, column) for column in zip(*gradients))


ANSWERS = [
    Answers(check.data_parallel.scatter, [larger_parts_last], [], on=1),
    Answers(check.data_parallel.parallel_apply, [with_futures], [], on=1),
    Answers(check.data_parallel.reduce, [folds], [], on=1),
]
