"""Answers to ``check.overlap``."""

import time
from functools import partial

import torch
from graded import Answers, ends

from answers.ddp import watches
from workbook import check

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


def finishes(parameters, buckets, flats, handles, batch_size):
    for bucket, flat, handle in zip(buckets, flats, handles):
        handle.wait()
        pieces = (flat / batch_size).split([parameters[i].numel() for i in bucket])
        for index, piece in zip(bucket, pieces):
            parameters[index].grad = piece.view_as(parameters[index])


# backward(loss, parameters, buckets, start, batch_size)


def flat_of(parameters, bucket):
    own = (parameters[i] for i in bucket)
    return torch.cat(
        [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in own]
    )


def overlaps(loss, parameters, buckets, start, batch_size, remove=True, rest="started"):
    """A right answer, or with other options a wrong one."""
    flats, handles = {}, {}

    def launch(number):
        flats[number] = flat_of(parameters, buckets[number])
        handles[number] = start(flats[number])

    hooks = watches(parameters, in_order(buckets, launch))
    loss.backward()
    for hook in hooks if remove else ():
        hook.remove()
    # A bucket with a gradient that never comes is not complete.
    while rest == "waited for" and len(handles) < len(buckets):
        time.sleep(0.01)
    for number in range(len(buckets) if rest == "started" else 0):
        if number not in handles:
            launch(number)
    chosen = [[them[b] for b in sorted(handles)] for them in (buckets, flats, handles)]
    finishes(parameters, *chosen, batch_size)


ANSWERS = [
    Answers(
        check.overlap.in_order,
        [in_order],
        [
            as_they_fill,
            lambda buckets, start: in_order(buckets[::-1], start),
        ],
    ),
    Answers(
        check.overlap.backward,
        [overlaps],
        [
            partial(overlaps, remove=False),
            partial(overlaps, rest="left"),
            ends(partial(overlaps, rest="waited for")),
        ],
    ),
]
