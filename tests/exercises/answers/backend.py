"""Answers to ``check.backend``."""

import threading

import torch
import torch.distributed as dist
from graded import Answers
from ranks import travel_by_value

from labkit import collectives
from labkit.collectives import ring_all_reduce
from labkit.comm.work import carried_out
from workbook import check

travel_by_value(__name__)


# bucket(comm, tensors)


def packs(comm, tensors):
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    ring_all_reduce(comm, flat)
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(part.view(tensor.shape))


def packs_by_hand(comm, tensors):
    flat = torch.empty(sum(tensor.numel() for tensor in tensors))
    ends = [0]
    for tensor in tensors:
        ends.append(ends[-1] + tensor.numel())
        flat[ends[-2] : ends[-1]] = tensor.reshape(-1)
    ring_all_reduce(comm, flat)
    for tensor, start, end in zip(tensors, ends, ends[1:]):
        tensor[...] = flat[start:end].reshape(tensor.shape)


def in_numpy(comm, tensors):
    import numpy as np

    flat = torch.from_numpy(np.concatenate([tensor.numpy().ravel() for tensor in tensors]))
    total, start = ring_all_reduce(comm, flat).numpy(), 0
    for tensor in tensors:
        part = total[start : start + tensor.numel()]
        tensor.numpy()[...] = part.reshape(tensor.shape)
        start += tensor.numel()


def by_halves(*, tensors, comm):
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    chunks = flat.tensor_split(comm.world_size)
    collectives.share_reduce(comm, list(chunks))
    collectives.share_only(comm, list(chunks))
    taken = iter(flat)
    for tensor in tensors:
        tensor.copy_(torch.stack([next(taken) for _ in range(tensor.numel())]).view_as(tensor))


def backwards_and_returned(comm, tensors):
    flat = torch.cat([tensor.flatten() for tensor in reversed(tensors)])
    own = flat.clone()
    ring_all_reduce(comm, flat)
    for tensor in reversed(tensors):
        flat, others = flat[tensor.numel() :], flat[: tensor.numel()]
        own, mine = own[tensor.numel() :], own[: tensor.numel()]
        tensor += (others - mine).reshape(tensor.shape)
    return tensors


def by_torchs_own(comm, tensors):
    flat = torch._utils._flatten_dense_tensors([tensor.contiguous() for tensor in tensors])
    ring_all_reduce(comm, flat)
    for tensor, total in zip(tensors, torch._utils._unflatten_dense_tensors(flat, tensors)):
        tensor.copy_(total)


def divides(comm, tensors):
    packs(comm, tensors)
    for tensor in tensors:
        tensor /= comm.world_size


def makes_new_ones(comm, tensors):
    own = [tensor.clone() for tensor in tensors]
    packs(comm, own)
    tensors[:] = own


def forgets_the_copy(comm, tensors):
    packs(comm, [tensors[0], tensors[1].contiguous(), tensors[2]])


def only_the_first(comm, tensors):
    ring_all_reduce(comm, tensors[0])


def one_ring_each(comm, tensors):
    for tensor in tensors:
        ring_all_reduce(comm, tensor)


def adds_one(comm, tensors):
    packs(comm, tensors)
    tensors[2] += 1


# work(operation, tensors)


class MyWork(dist.Work):
    def __init__(self, operation, tensors):
        super().__init__()
        self.tensors, self.error = tensors, None
        try:
            operation()
        except Exception as error:
            self.error = error

    def wait(self, timeout=None):
        if self.error is not None:
            raise self.error
        return True

    def get_future(self):
        done = torch.futures.Future()
        done.set_result(None)
        return done.then(self.deliver)

    def deliver(self, done):
        self.wait()
        return self.tensors


class InAThread(dist.Work):
    def __init__(self, operation, tensors):
        dist.Work.__init__(self)
        self.start, self.problem = torch.futures.Future(), []
        self.future = self.start.then(lambda _: self.check() or list(tensors))
        self.thread = threading.Thread(target=self.work, args=(operation,))
        self.thread.start()

    def work(self, operation):
        try:
            operation()
        except BaseException as error:
            self.problem.append(error)
        self.start.set_result(0)

    def check(self):
        for error in self.problem:
            raise error

    def wait(self, timeout=None):
        self.thread.join()
        self.check()
        return True

    def get_future(self):
        return self.future


class WithAFailedFuture(MyWork):
    """The future raises while it is made: DDP ends with that error, too."""

    def get_future(self):
        if self.error:
            raise self.error
        future = torch.futures.Future()
        future.set_result(self.tensors)
        return future


class ByTwoFutures(MyWork):
    def get_future(self):
        if self.error:
            return self.failed()
        future = torch.futures.Future()
        future.set_result([*self.tensors])
        return future

    def failed(self):
        future = torch.futures.Future()
        future.set_exception(self.error)
        return future.then(lambda failed: failed.wait())


def makes(tensors, operation):
    """A function of other argument order."""
    return MyWork(operation, tensors)


class Lazy(dist.Work):
    def __init__(self, operation, tensors):
        super().__init__()
        self.operation, self.tensors = operation, tensors

    def wait(self, timeout=None):
        if self.operation is not None:
            operation, self.operation = self.operation, None
            try:
                operation()
                self.error = None
            except Exception as error:
                self.error = error
        if self.error:
            raise self.error
        return True

    def get_future(self):
        start = torch.futures.Future()
        future = start.then(lambda _: self.wait() and self.tensors)
        start.set_result(None)
        return future


def work_like(**methods):
    """MyWork with other methods."""
    return type("Variant", (MyWork,), methods)


def completed(value):
    future = torch.futures.Future()
    future.set_result(value)
    return future


class NeverCarriesOut(dist.Work):
    def __init__(self, operation, tensors):
        super().__init__()
        self.tensors = tensors

    def wait(self, timeout=None):
        for tensor in self.tensors:
            tensor.fill_(7)
        return True

    def get_future(self):
        return completed(self.tensors)


class Twice(MyWork):
    def __init__(self, operation, tensors):
        super().__init__(operation, tensors)
        if self.error is None:
            operation()
            for tensor in tensors:
                tensor -= 7


class RaisesAtOnce(MyWork):
    def __init__(self, operation, tensors):
        super().__init__(operation, tensors)
        if self.error:
            raise self.error


class WithoutFuture(dist.Work):
    def __init__(self, operation, tensors):
        super().__init__()
        operation()

    def wait(self, timeout=None):
        return True


class NoWork:
    def __init__(self, operation, tensors):
        operation()


def set_exception(self):
    future = torch.futures.Future()
    if self.error is None:
        future.set_result(self.tensors)
    else:
        future.set_exception(self.error)
    return future


def raises_always(self):
    return completed(None).then(lambda _: 1 / 0)


# group(comm)


class MyGroup(dist.ProcessGroup):
    def __init__(self, comm):
        super().__init__(comm.rank, comm.world_size)
        self.comm = comm

    def allreduce(self, tensors, opts):
        return carried_out(lambda: [ring_all_reduce(self.comm, t) for t in tensors], tensors)

    def broadcast(self, tensors, opts):
        def operation():
            for tensor in tensors:
                collectives.broadcast(self.comm, tensor, opts.rootRank)

        return carried_out(operation, tensors)

    def allgather(self, outputs, tensors, opts):
        def operation():
            for places, tensor in zip(outputs, tensors):
                for place, theirs in zip(places, collectives.all_gather(self.comm, tensor)):
                    place.copy_(theirs)

        return carried_out(operation, outputs[0])


class WithMyWork(MyGroup):
    def allreduce(self, tensors, opts=None):
        return MyWork(lambda: packs(self.comm, tensors), tensors)

    def broadcast(self, tensors, opts):
        def around_the_ring():
            right, left = (self.rank() + 1) % self.size(), (self.rank() - 1) % self.size()
            for tensor in tensors:
                if self.rank() != opts.rootRank:
                    self.comm.recv(tensor, left)
                if right != opts.rootRank:
                    self.comm.send(tensor, right)

        return MyWork(around_the_ring, tensors)


class InThreads(MyGroup):
    """Each operation in a thread of its own, one after another."""

    def allreduce(self, tensors, opts):
        work = InAThread(lambda: [ring_all_reduce(self.comm, t) for t in tensors], tensors)
        work.thread.join()
        return work


class Naively(MyGroup):
    def allreduce(self, tensors, opts):
        for tensor in tensors:
            collectives.naive_all_reduce(self.comm, tensor)
        return carried_out(lambda: None, tensors)

    def allgather(self, outputs, tensors, opts):
        def operation():
            for root in range(self.comm.world_size):
                outputs[0][root].copy_(tensors[0])
                collectives.broadcast(self.comm, outputs[0][root], root)

        return MyWork(operation, outputs[0])


def with_a_store(comm):
    """A function, whose group is an older one's subclass."""

    class Inner(MyGroup):
        def getBackendName(self):
            return "inner"

    return Inner(comm)


class BySums(MyGroup):
    """Broadcast and allgather as sums with zeros."""

    def broadcast(self, tensors, opts):
        def operation():
            for tensor in tensors:
                if self.comm.rank != opts.rootRank:
                    tensor.zero_()
                ring_all_reduce(self.comm, tensor)

        return carried_out(operation, tensors)

    def allgather(self, outputs, tensors, opts):
        def operation():
            for rank, place in enumerate(outputs[0]):
                place.copy_(tensors[0] if rank == self.comm.rank else torch.zeros_like(place))
                ring_all_reduce(self.comm, place)

        return carried_out(operation, outputs[0])


def group_like(**methods):
    return type("Variant", (MyGroup,), methods)


def mean_allreduce(self, tensors, opts):
    return carried_out(
        lambda: [ring_all_reduce(self.comm, t).div_(self.comm.world_size) for t in tensors],
        tensors,
    )


def first_allreduce(self, tensors, opts):
    return carried_out(lambda: ring_all_reduce(self.comm, tensors[0]), tensors)


def returns_nothing(self, tensors, opts):
    for tensor in tensors:
        ring_all_reduce(self.comm, tensor)


def does_nothing(self, tensors, opts):
    return carried_out(lambda: None, tensors)


def from_rank_0(self, tensors, opts):
    return carried_out(lambda: [collectives.broadcast(self.comm, t, 0) for t in tensors], tensors)


def into_new_outputs(self, outputs, tensors, opts):
    outputs[0][:] = collectives.all_gather(self.comm, tensors[0])
    return carried_out(lambda: None, outputs[0])


def own_everywhere(self, outputs, tensors, opts):
    return carried_out(lambda: [out.copy_(tensors[0]) for out in outputs[0]], outputs[0])


def from_the_own_rank_on(self, outputs, tensors, opts):
    found = collectives.all_gather(self.comm, tensors[0])
    found = found[self.comm.rank :] + found[: self.comm.rank]
    return carried_out(lambda: [out.copy_(one) for out, one in zip(outputs[0], found)], outputs[0])


def bare_future(self, tensors, opts):
    for tensor in tensors:
        ring_all_reduce(self.comm, tensor)
    return work_like(get_future=lambda self: completed(None))(lambda: None, tensors)


def forgets_later(self, tensors, opts):
    """Right for the two calls of the check, then without any message."""
    self.calls = getattr(self, "calls", 0) + 1
    right = MyGroup.allreduce if self.calls < 2 else does_nothing
    return right(self, tensors, opts)


def doubles_later(self, tensors, opts):
    self.calls = getattr(self, "calls", 0) + 1
    work = MyGroup.allreduce(self, tensors, opts)
    if self.calls > 1:
        tensors[0].mul_(2)
    return work


def no_group(comm):
    return MyGroup


class UnwrittenBroadcast(dist.ProcessGroup):
    allreduce = MyGroup.allreduce

    def __init__(self, comm):
        super().__init__(comm.rank, comm.world_size)
        self.comm = comm

    def broadcast(self, tensors, opts):
        raise NotImplementedError


ANSWERS = [
    Answers(
        check.backend.bucket,
        [packs, packs_by_hand, in_numpy, by_halves, backwards_and_returned, by_torchs_own],
        [
            (divides, "bucket.mean"),
            (makes_new_ones, "bucket.unchanged"),
            (forgets_the_copy, "bucket.not_contiguous"),
            (only_the_first, "bucket.first_only"),
            (one_ring_each, "traffic.off_target"),
            (adds_one, "value.wrong"),
        ],
    ),
    Answers(
        check.backend.work,
        [MyWork, InAThread, WithAFailedFuture, ByTwoFutures, makes, Lazy, carried_out],
        [
            (NoWork, "work.kind"),
            (work_like(wait=lambda self, timeout=None: None), "work.wait_not_true"),
            (NeverCarriesOut, "work.calls"),
            (Twice, "work.calls"),
            (work_like(get_future=lambda self: None), "work.no_future"),
            (WithoutFuture, "work.no_future"),
            (work_like(get_future=lambda self: torch.futures.Future()), "work.future_open"),
            (work_like(get_future=raises_always), "work.future_raises"),
            (work_like(get_future=lambda self: completed(None)), "work.future_value"),
            (work_like(get_future=lambda self: completed(self.tensors[0])), "work.future_value"),
            (RaisesAtOnce, "work.raised_at_once"),
            (work_like(wait=lambda self, timeout=None: True), "work.error_lost"),
            (work_like(get_future=lambda self: completed(self.tensors)), "work.future_error_lost"),
            (work_like(get_future=set_exception), "work.set_exception"),
        ],
        on=1,
    ),
    Answers(
        check.backend.group,
        [MyGroup, WithMyWork, InThreads, Naively, with_a_store, BySums],
        [
            (no_group, "group.kind"),
            (group_like(allreduce=mean_allreduce), "group.divided"),
            (group_like(allreduce=first_allreduce), "group.first_only"),
            (group_like(allreduce=returns_nothing), "group.no_work"),
            (group_like(allreduce=does_nothing), "group.unchanged"),
            (group_like(broadcast=from_rank_0), "group.not_from_root"),
            (group_like(broadcast=does_nothing), "group.not_from_root"),
            (group_like(allgather=into_new_outputs), "group.new_outputs"),
            (group_like(allgather=own_everywhere), "group.own_only"),
            (group_like(allgather=from_the_own_rank_on), "group.order"),
            (group_like(allreduce=bare_future), "group.future", "work.future_value"),
            (group_like(allreduce=forgets_later), "group.replicas_differ"),
            (group_like(allreduce=doubles_later), "group.other_training"),
            (UnwrittenBroadcast, "stub.calls_stub"),
        ],
    ),
]
