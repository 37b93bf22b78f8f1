"""Answers to ``check.overlap``."""

import itertools
import time
from collections import Counter

import numpy as np
import torch
from graded import Answers
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


class Launcher:
    def __init__(self, buckets, start):
        self.bucket_of = {i: b for b, bucket in enumerate(buckets) for i in bucket}
        self.left = Counter(self.bucket_of.values())
        self.turn, self.start = 0, start

    def __call__(self, index):
        self.left[self.bucket_of[index]] -= 1
        while self.turn in self.left and self.left[self.turn] == 0:
            self.turn += 1
            self.start(self.turn - 1)


def counts_down(*, start, buckets):
    left, turns = [len(bucket) for bucket in buckets], itertools.count()
    turn = next(turns)

    def ready(index):
        nonlocal turn
        (mine,) = (b for b, bucket in enumerate(buckets) if index in bucket)
        left[mine] -= 1
        while turn < len(left) and not left[turn]:
            start(turn)
            turn = next(turns)

    return ready


def with_a_generator(buckets, start):
    def launcher():
        arrived = set()
        for number, bucket in enumerate(buckets):
            while not arrived.issuperset(bucket):
                arrived.add((yield))
            start(number)
        while True:
            yield

    running = launcher()
    next(running)
    return running.send


def recursively(buckets, start):
    arrived, turn = [], [0]

    def go_on():
        if turn[0] < len(buckets) and all(i in arrived for i in buckets[turn[0]]):
            turn[0] += 1
            start(turn[0] - 1)
            go_on()

    def ready(index):
        arrived.append(index)
        go_on()

    return ready


def with_numpy(buckets, start):
    bucket_of = np.full(1 + max(map(max, buckets)), -1)
    for number, bucket in enumerate(buckets):
        bucket_of[bucket] = number
    left, turn = np.bincount(bucket_of), 0

    def ready(index):
        nonlocal turn
        left[bucket_of[index]] -= 1
        now = len(left) if not left.any() else np.flatnonzero(left)[0]
        for number in np.arange(turn, now):
            start(number)
        turn = max(turn, now)

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


def looks_at_its_own_bucket(buckets, start):
    missing, turn = [set(bucket) for bucket in buckets], [0]

    def ready(index):
        for number, bucket in enumerate(missing):
            if index in bucket:
                bucket.discard(index)
                if not bucket and number == turn[0]:
                    turn[0] += 1
                    start(number)

    return ready


def starts_one_at_a_time(buckets, start):
    missing, turn = [set(bucket) for bucket in buckets], [0]

    def ready(index):
        for bucket in missing:
            bucket.discard(index)
        if turn[0] < len(buckets) and not missing[turn[0]]:
            turn[0] += 1
            start(turn[0] - 1)

    return ready


def all_at_the_end(buckets, start):
    missing = {index for bucket in buckets for index in bucket}

    def ready(index):
        missing.discard(index)
        if not missing:
            for number in range(len(buckets)):
                start(number)

    return ready


def counts_gradients(buckets, start):
    so_far, ends = [0], [*itertools.accumulate(map(len, buckets))]

    def ready(index):
        so_far[0] += 1
        if so_far[0] in ends:
            start(ends.index(so_far[0]))

    return ready


def starts_again_and_again(buckets, start):
    missing = [set(bucket) for bucket in buckets]

    def ready(index):
        for number, bucket in enumerate(missing):
            bucket.discard(index)
            if bucket:
                return
            start(number)

    return ready


def gives_the_bucket(buckets, start):
    return in_order(buckets, lambda number: start(buckets[number]))


def skips_bucket_1(buckets, start):
    """Overtakes a bucket if there are three, and its gradient is the only one that misses."""
    ready, last = in_order(buckets, start), {}

    def skipping(index):
        ready(index)
        last[index] = True
        if buckets == [[2], [1], [0]] and list(last) == [2, 0]:
            start(2)

    return skipping


def empties_the_buckets(buckets, start):
    turn = itertools.count()
    left = list(buckets)

    def ready(index):
        for bucket in buckets:
            if index in bucket:
                bucket.remove(index)
        while left and not left[0]:
            left.pop(0)
            start(next(turn))

    return ready


def returns_nothing(buckets, start):
    in_order(buckets, start)


WRONG_ORDERS = [
    (as_they_fill, "in_order.orders"),
    (looks_at_its_own_bucket, "in_order.never"),
    (starts_one_at_a_time, "in_order.late"),
    (all_at_the_end, "in_order.late"),
    (counts_gradients, "in_order.too_early"),
    (starts_again_and_again, "in_order.twice"),
    (gives_the_bucket, "in_order.number"),
    (skips_bucket_1, "in_order.overtakes"),
    (empties_the_buckets, "in_order.changed"),
    (returns_nothing, "in_order.not_callable"),
]


# finish(parameters, buckets, flats, handles, batch_size)


def finishes(parameters, buckets, flats, handles, batch_size):
    for bucket, flat, handle in zip(buckets, flats, handles):
        handle.wait()
        pieces = (flat / batch_size).split([parameters[i].numel() for i in bucket])
        for index, piece in zip(bucket, pieces):
            parameters[index].grad = piece.view_as(parameters[index])


def waits_for_all_first(*, flats, handles, buckets, parameters, batch_size):
    assert all([handle.wait() for handle in reversed(handles)])
    for bucket, flat in zip(buckets, flats):
        flat.mul_(1 / batch_size)
        for index in bucket:
            size = parameters[index].numel()
            parameters[index].grad = flat[:size].reshape(parameters[index].shape).clone()
            flat = flat[size:]


def in_place(parameters, buckets, flats, handles, batch_size):
    for number, handle in enumerate(handles):
        handle.wait()
        start = 0
        for index in buckets[number]:
            parameter = parameters[index]
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            end = start + parameter.numel()
            parameter.grad.copy_(flats[number][start:end].view(parameter.shape)).div_(batch_size)
            start = end


def through_numpy(parameters, buckets, flats, handles, batch_size):
    for bucket, flat, handle in zip(buckets, flats, handles):
        handle.wait()
        cuts = np.cumsum([parameters[i].numel() for i in bucket])[:-1]
        for index, piece in zip(bucket, np.split(flat.numpy() / np.float32(batch_size), cuts)):
            parameters[index].grad = torch.from_numpy(piece).reshape(parameters[index].shape)


def one_long_row(parameters, buckets, flats, handles, batch_size):
    for handle in handles:
        handle.wait()
    row, order = torch.cat(flats) / batch_size, [i for bucket in buckets for i in bucket]
    for index, piece in zip(order, row.split([parameters[i].numel() for i in order])):
        parameters[index].grad = piece.view_as(parameters[index])


def bucket_by_bucket(parameters, buckets, flats, handles, batch_size):
    if buckets:
        finishes(parameters, buckets[:1], flats[:1], handles[:1], batch_size)
        bucket_by_bucket(parameters, buckets[1:], flats[1:], handles[1:], batch_size)


def waits_for_the_first(parameters, buckets, flats, handles, batch_size):
    handles[0].wait()
    copies(parameters, buckets, flats, batch_size)


def copies(parameters, buckets, flats, divisor, order=iter):
    for bucket, flat in zip(buckets, flats):
        for index in order(bucket):
            size = parameters[index].numel()
            parameters[index].grad = (flat[:size] / divisor).view_as(parameters[index])
            flat = flat[size:]


def copies_first(parameters, buckets, flats, handles, batch_size):
    copies(parameters, buckets, flats, batch_size)
    for handle in handles:
        handle.wait()


def never_divides(parameters, buckets, flats, handles, batch_size):
    finishes(parameters, buckets, flats, handles, 1)


def divides_twice(parameters, buckets, flats, handles, batch_size):
    finishes(parameters, buckets, flats, handles, batch_size**2)


def divides_by_buckets(parameters, buckets, flats, handles, batch_size):
    finishes(parameters, buckets, flats, handles, len(buckets))


def in_the_order_of_the_parameters(parameters, buckets, flats, handles, batch_size):
    for handle in handles:
        handle.wait()
    copies(parameters, buckets, flats, batch_size, order=sorted)


def adds_to_its_own(parameters, buckets, flats, handles, batch_size):
    had = [parameter.grad for parameter in parameters]
    finishes(parameters, buckets, flats, handles, batch_size)
    for parameter, own in zip(parameters, had):
        if own is not None:
            parameter.grad = parameter.grad + own


def divides_before_it_waits(parameters, buckets, flats, handles, batch_size):
    for flat in flats:
        flat.div_(batch_size)
    finishes(parameters, buckets, flats, handles, 1)


def leaves_none(parameters, buckets, flats, handles, batch_size):
    had = [parameter.grad is not None for parameter in parameters]
    finishes(parameters, buckets, flats, handles, batch_size)
    for parameter, was_there in zip(parameters, had):
        parameter.grad = parameter.grad if was_there else None


def makes_the_update(parameters, buckets, flats, handles, batch_size):
    finishes(parameters, buckets, flats, handles, batch_size)
    torch.optim.SGD(parameters, lr=0.1).step()


WRONG_FINISHES = [
    (waits_for_the_first, "finish.never_waited"),
    (copies_first, "finish.before_wait"),
    (adds_to_its_own, "finish.added"),
    (never_divides, "finish.not_divided"),
    (divides_before_it_waits, "finish.not_divided", "after wait() has brought the sum"),
    (divides_twice, "finish.divided_twice"),
    (divides_by_buckets, "finish.differs"),
    (in_the_order_of_the_parameters, "finish.differs"),
    (leaves_none, "finish.none"),
    (makes_the_update, "gradient.updated"),
]


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
    launcher=in_order,
    rest=True,
    remove=True,
    done=finishes,
    after_start=lambda handle: None,
):
    """A right answer, or with other arguments a wrong one."""
    flats, handles = {}, {}

    def launch(number):
        flats[number] = flat_of(parameters, buckets[number])
        handles[number] = start(flats[number])
        after_start(handles[number])

    hooks = watches(parameters, launcher(buckets, launch))
    loss.backward()
    for hook in hooks if remove else ():
        hook.remove()
    for number in range(len(buckets) if rest else 0):
        if number not in handles:
            launch(number)
    order = sorted(handles)
    chosen = [[them[b] for b in order] for them in (buckets, flats, handles)]
    done(parameters, *chosen, batch_size)


def variant(**options):
    def fn(loss, parameters, buckets, start, batch_size):
        overlaps(loss, parameters, buckets, start, batch_size, **options)

    return fn


class Overlap:
    """One object a step, with views of a flat tensor that is made before backward."""

    def __init__(self, loss, parameters, buckets, start, batch_size):
        self.parameters, self.buckets, self.start = parameters, buckets, start
        self.left = [set(bucket) for bucket in buckets]
        sizes = [sum(parameters[i].numel() for i in bucket) for bucket in buckets]
        self.flats = [torch.zeros(size) for size in sizes]
        self.handles = []
        hooks = [
            p.register_post_accumulate_grad_hook(lambda p, i=i: self.ready(i))
            for i, p in enumerate(parameters)
        ]
        loss.backward()
        for hook in hooks:
            hook.remove()
        while len(self.handles) < len(buckets):
            self.send()
        waits_for_all_first(
            parameters=parameters,
            buckets=buckets,
            flats=self.flats,
            handles=self.handles,
            batch_size=batch_size,
        )

    def ready(self, index):
        for left in self.left:
            left.discard(index)
        while len(self.handles) < len(self.buckets) and not self.left[len(self.handles)]:
            self.send()

    def send(self):
        number = len(self.handles)
        self.flats[number].copy_(flat_of(self.parameters, self.buckets[number]))
        self.handles.append(self.start(self.flats[number]))


def divides_the_loss(loss, parameters, buckets, start, batch_size):
    overlaps(loss / batch_size, parameters, buckets, start, 1)


def divides_before_it_sends(*, buckets, parameters, loss, start, batch_size):
    overlaps(loss, parameters, buckets, lambda flat: start(flat.div_(batch_size)), 1)


def in_rows(loss, parameters, buckets, start, batch_size):
    """The flat tensors have another shape, and are not contiguous."""
    overlaps(loss, parameters, buckets, lambda flat: start(flat.view(1, -1).t()), batch_size)


def starts_numbers(loss, parameters, buckets, start, batch_size):
    watches(parameters, in_order(buckets, start))
    loss.backward()


def sums_before(loss, parameters, buckets, start, batch_size, launch_all=False):
    loss.backward()
    flats = [flat_of(parameters, bucket) for bucket in buckets]
    finishes(parameters, buckets, flats, [start(flat) for flat in flats], batch_size)


def computes_nothing(loss, parameters, buckets, start, batch_size):
    flats = [flat_of(parameters, bucket) for bucket in buckets]
    finishes(parameters, buckets, flats, [start(flat) for flat in flats], batch_size)


def starts_nothing(loss, parameters, buckets, start, batch_size):
    loss.backward()
    for parameter in parameters:
        parameter.grad = None if parameter.grad is None else parameter.grad / batch_size


def one_for_each_parameter(loss, parameters, buckets, start, batch_size):
    overlaps(loss, parameters, [[i] for bucket in buckets for i in bucket], start, batch_size)


def waits_in_the_hook(loss, parameters, buckets, start, batch_size):
    overlaps(loss, parameters, buckets, start, batch_size, after_start=lambda h: h.wait())


def never_waits(parameters, buckets, flats, handles, batch_size):
    copies(parameters, buckets, flats, batch_size)


def divides_by_two(parameters, buckets, flats, handles, batch_size):
    finishes(parameters, buckets, flats, handles, batch_size * 2)


def divides_by_the_ranks(parameters, buckets, flats, handles, batch_size):
    """On three ranks."""
    finishes(parameters, buckets, flats, handles, 3)


def divides_by_both(parameters, buckets, flats, handles, batch_size):
    finishes(parameters, buckets, flats, handles, 3 * batch_size)


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


def ready_for_the_next(buckets, start):
    """In the end it is as in the beginning."""
    ready, arrived = [in_order(buckets, start)], []

    def once_more(index):
        ready[0](index)
        arrived.append(index)
        if len(arrived) == sum(map(len, buckets)):
            arrived.clear()
            ready[0] = in_order(buckets, start)

    return once_more


def first_one_early(buckets, start):
    """The first bucket leaves in time, the others with the last gradient."""
    missing, left = set(buckets[0]), {i for bucket in buckets for i in bucket}

    def ready(index):
        if index in missing:
            missing.discard(index)
            if not missing:
                start(0)
        left.discard(index)
        if not left:
            for number in range(1, len(buckets)):
                start(number)

    return ready


def forgets_bucket_1(buckets, start):
    return in_order(buckets, lambda number: start(number) if number != 1 else None)


WRONG_OVERLAPS = [
    (starts_numbers, "run.error", "a tensor is needed, got int: 0"),
    (sums_before, "overlap.after_backward"),
    (computes_nothing, "overlap.no_backward"),
    (starts_nothing, "overlap.nothing_started"),
    (one_for_each_parameter, "overlap.not_the_buckets"),
    (waits_in_the_hook, "overlap.waited_at_once"),
    (variant(launcher=as_they_fill), "in_order.orders"),
    (variant(launcher=counts_gradients), "in_order.too_early"),
    (variant(launcher=first_one_early), "in_order.late"),
    (variant(launcher=forgets_bucket_1, rest=False), "overlap.never_started"),
    (variant(rest=False), "overlap.never_full"),
    (variant(launcher=starts_again_and_again), "overlap.not_the_buckets"),
    (variant(remove=False), "overlap.hooks_left", "8 hooks are still on the parameters"),
    (variant(remove=False, launcher=ready_for_the_next), "overlap.hooks_left"),
    (variant(done=never_waits), "overlap.never_waited"),
    (variant(done=never_divides), "gradient.sum"),
    (variant(done=divides_twice), "finish.divided_twice"),
    (variant(done=divides_by_the_ranks), "gradient.over_ranks"),
    (variant(done=divides_by_both), "gradient.twice_by_ranks"),
    (variant(done=divides_by_two), "overlap.differs"),
    (variant(done=leaves_none), "overlap.none"),
    (variant(done=copies_first), "gradient.own_share"),
    (variant(done=makes_the_update), "gradient.updated"),
    (waits_for_all_starts, "overlap.endless"),
]


ANSWERS = [
    Answers(
        check.overlap.in_order,
        [in_order, Launcher, counts_down, with_a_generator, recursively, with_numpy],
        WRONG_ORDERS,
    ),
    Answers(
        check.overlap.finish,
        [finishes, waits_for_all_first, in_place, through_numpy, one_long_row, bucket_by_bucket],
        WRONG_FINISHES,
    ),
    Answers(
        check.overlap.backward,
        [
            variant(),
            Overlap,
            divides_the_loss,
            divides_before_it_sends,
            in_rows,
            variant(done=in_place),
        ],
        WRONG_OVERLAPS,
    ),
]
