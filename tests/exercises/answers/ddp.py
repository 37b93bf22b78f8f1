"""Answers to ``check.ddp``."""

import functools

from graded import Answers
from torch.autograd import Variable
from torch.nn import functional

from labkit.collectives import ring_all_reduce
from labkit.schedules.bucket_assignment import assign_buckets
from workbook import check

# average(comm, model, inputs, targets, batch_size)


def averages(comm, model, inputs, targets, batch_size):
    loss = functional.cross_entropy(model(inputs), targets, reduction="sum") / batch_size
    loss.backward()
    for parameter in model.parameters():
        ring_all_reduce(comm, parameter.grad)


def averages_means(comm, model, inputs, targets, batch_size):
    averages(comm, model, inputs, targets, max(1, len(inputs)) * comm.world_size)


def makes_the_update(comm, model, inputs, targets, batch_size):
    averages(comm, model, inputs, targets, batch_size)
    for parameter in model.parameters():
        parameter.data -= 0.1 * parameter.grad


# hooks(parameters, ready)


def watches(parameters, ready):
    return [
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: ready(index))
        for index, parameter in enumerate(parameters)
    ]


def gives_the_parameter(parameters, ready):
    return [p.register_post_accumulate_grad_hook(ready) for p in parameters]


def passes_the_parameter_on(parameters, ready):
    return [
        p.register_post_accumulate_grad_hook(functools.partial(ready, i))
        for i, p in enumerate(parameters)
    ]


def before_grad_is_set(parameters, ready):
    return [p.register_hook(lambda _, i=i: ready(i)) for i, p in enumerate(parameters)]


def ready_when_all_is_over(parameters, ready):
    """Nothing could overlap with backward."""
    came = []

    def at_the_end():
        for index in came:
            ready(index)
        came.clear()

    def note(index):
        if not came:
            Variable._execution_engine.queue_callback(at_the_end)
        came.append(index)

    return [
        parameter.register_post_accumulate_grad_hook(lambda _, index=index: note(index))
        for index, parameter in enumerate(parameters)
    ]


def with_what_is_left(sizes, cap, first_cap):
    """Also where nothing is left, since the last bucket is full."""
    buckets = assign_buckets(sizes, cap, first_cap)
    caps = [first_cap, *[cap] * len(buckets)]
    is_full = sum(sizes[index] for index in buckets[-1]) >= caps[len(buckets) - 1]
    return [*buckets, []] if is_full else buckets


ANSWERS = [
    Answers(
        check.ddp.buckets,
        [assign_buckets],
        [
            lambda sizes, cap, first_cap: assign_buckets(sizes, cap, cap),
            lambda *args: assign_buckets(*args)[:-1],
            with_what_is_left,
        ],
    ),
    Answers(check.ddp.average, [averages], [averages_means, makes_the_update]),
    Answers(
        check.ddp.hooks,
        [watches],
        [
            passes_the_parameter_on,
            gives_the_parameter,
            before_grad_is_set,
            ready_when_all_is_over,
        ],
    ),
]
