"""Answers to ``check.overlap``."""

import time

import torch
from graded import Answers, ends
from ranks import travel_by_value

from answers.ddp import watches
from workbook import check

travel_by_value(__name__)


# in_order(buckets, start)


def in_order(buckets, start):
    missing, started = [set(bucket) for bucket in buckets], []

    def ready(index):
        for bucket in missing:
            bucket.discard(index)
        while len(started) < len(buckets) and not missing[len(started)]:
            started.append(len(started))
            start(started[-1])

    return ready


def as_they_fill(buckets, start):
    missing = [set(bucket) for bucket in buckets]

    def ready(index):
        for number, bucket in enumerate(missing):
            if index in bucket:
                bucket.discard(index)
                if not bucket:
                    start(number)

    return ready


def returns_nothing(buckets, start):
    in_order(buckets, start)


# finish(parameters, buckets, flats, handles, batch_size)


def finishes(parameters, buckets, flats, handles, batch_size):
    for bucket, flat, handle in zip(buckets, flats, handles):
        handle.wait()
        pieces = (flat / batch_size).split([parameters[i].numel() for i in bucket])
        for index, piece in zip(bucket, pieces):
            parameters[index].grad = piece.view_as(parameters[index])


def bucket_by_bucket(parameters, buckets, flats, handles, batch_size):
    if buckets:
        finishes(parameters, buckets[:1], flats[:1], handles[:1], batch_size)
        bucket_by_bucket(parameters, buckets[1:], flats[1:], handles[1:], batch_size)


def waits_for_the_first(parameters, buckets, flats, handles, batch_size):
    handles[0].wait()
    finishes(parameters, buckets, flats, handles[:1] * len(handles), batch_size)


def makes_the_update(parameters, buckets, flats, handles, batch_size):
    finishes(parameters, buckets, flats, handles, batch_size)
    torch.optim.SGD(parameters, lr=0.1).step()


# overlapped_backward(loss, parameters, buckets, start, batch_size)


def flat_of(parameters, bucket):
    own = (parameters[i] for i in bucket)
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in own]
    )


def overlaps(
    loss,
    parameters,
    buckets,
    start,
    batch_size,
    remove=True,
):
    """A right answer, or with other arguments a wrong one."""
    flats, handles = {}, {}

    def launch(number):
        flats[number] = flat_of(parameters, buckets[number])
        handles[number] = start(flats[number])

    hooks = watches(parameters, in_order(buckets, launch))
    loss.backward()
    for hook in hooks if remove else ():
        hook.remove()
    for number in range(len(buckets)):
        if number not in handles:
            launch(number)
    order = sorted(handles)
    chosen = [[them[b] for b in order] for them in (buckets, flats, handles)]
    finishes(parameters, *chosen, batch_size)


def variant(**options):
    def fn(loss, parameters, buckets, start, batch_size):
        overlaps(loss, parameters, buckets, start, batch_size, **options)

    return fn


def waits_for_all_starts(loss, parameters, buckets, start, batch_size):
    """Does not end where a bucket is never complete."""
    flats, handles = {}, {}

    def launch(number):
        flats[number] = flat_of(parameters, buckets[number])
        handles[number] = start(flats[number])

    hooks = watches(parameters, in_order(buckets, launch))
    loss.backward()
    while len(handles) < len(buckets):
        time.sleep(0.01)
    for hook in hooks:
        hook.remove()
    finishes(parameters, buckets, flats.values(), handles.values(), batch_size)


ANSWERS = [
    Answers(
        check.overlap.in_order,
        [in_order],
        [as_they_fill, returns_nothing],
    ),
    Answers(
        check.overlap.finish,
        [bucket_by_bucket],
        [waits_for_the_first, makes_the_update],
    ),
    Answers(
        check.overlap.backward,
        [variant()],
        [variant(remove=False), ends(waits_for_all_starts)],
    ),
]
