"""The backend "labkit": PyTorch's own operations and training on our collectives, next to gloo.

Most of it runs in the ranks of ``labkit.run``, which hold a gloo group and a labkit group at once.
What a user without labkit's launcher sees is tested in plain processes; they come from the same
forkserver, so they start as fast. Only what concerns the start and the end of an interpreter
needs fresh ones.
"""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import warm_python
from ranks import equal, open_descriptors, plain, travel_by_value, wait_until
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit
from labkit import run
from labkit.collectives import ring_all_reduce, tree_all_reduce
from labkit.errors import MismatchError, PeerLostError

travel_by_value(__name__)

WORLD_SIZES = [1, 2, 3]


def mine(rank, size=5, dtype=torch.float32):
    return (torch.arange(size) + 10 * rank).to(dtype)


# Operations, next to gloo's: each takes (group, rank, P) and returns what must be equal. Every
# reduction and every public function: test_backend_wide.py, test_backend_public.py.


def all_reduce_shapes(group, rank, size):
    matrix, scalar = mine(rank, 6).view(2, 3), torch.tensor(float(rank))
    for tensor in (matrix.t(), scalar, torch.empty(0)):
        dist.all_reduce(tensor, group=group)
    return [matrix, scalar]


def with_a_future(group, rank, size):
    works = [dist.all_reduce(mine(rank) + n, group=group, async_op=True) for n in range(5)]
    found = [work.get_future().then(lambda done: 2 * done.value()[0]) for work in works]
    return [future.wait() for future in found] + [works[-1].wait(), works[-1].is_completed()]


def broadcast_from_each(group, rank, size):
    tensors = [mine(rank, dtype=dtype) for dtype in (torch.float32, torch.bool, torch.bfloat16)]
    for tensor in tensors:
        for root in range(size):
            dist.broadcast(tensor, root, group=group)
    return tensors


def all_gather(group, rank, size):
    found = []
    for length in (3, 0):
        tensors = [torch.zeros(length) for _ in range(size)]
        dist.all_gather(tensors, mine(rank, length), group=group)
        whole = torch.zeros(size * length)
        dist.all_gather_into_tensor(whole, mine(rank, length), group=group)
        found += [*tensors, whole]
    swapped = [torch.zeros(3, 2).t() for _ in range(size)]
    dist.all_gather(swapped, mine(rank, 6).view(3, 2).t(), group=group)
    return found + swapped


def reduce_scatter(group, rank, size):
    found = []
    for length in (3, 0):
        one, other = torch.zeros(length), torch.zeros(length)
        dist.reduce_scatter(one, [mine(rank, length) + r for r in range(size)], group=group)
        dist.reduce_scatter_tensor(other, mine(rank, length * size), group=group)
        found += [one, other]
    return found


def gather_scatter_reduce(group, rank, size):
    root = size - 1
    here = rank == root
    targets = [torch.zeros(5) for _ in range(size)] if here else None
    dist.gather(mine(rank), targets, dst=root, group=group)
    shares = [mine(r) for r in range(size)] if here else None
    dist.scatter(share := torch.zeros(5), shares, root, group=group)
    dist.reduce(total := mine(rank), root, dist.ReduceOp.MAX, group=group)
    # The contents of the other ranks' tensors after a reduce are not defined.
    return [*(targets or []), share, *([total] * here)]


def all_to_all(group, rank, size):
    sources = [mine(rank, 3) + 100 * r for r in range(size)]
    if dist.get_backend(group) == "gloo":
        # gloo of torch 2.11 takes no lists.
        dist.all_to_all_single(received := torch.zeros(3 * size), torch.cat(sources), group=group)
        targets = list(received.split(3))
    else:
        targets = [torch.zeros(3) for _ in range(size)]
        dist.all_to_all(targets, sources, group=group)
    even, nothing = torch.zeros(2 * size), torch.zeros(0)
    dist.all_to_all_single(even, mine(rank, 2 * size), group=group)
    dist.all_to_all_single(nothing, torch.zeros(0), group=group)
    uneven = torch.zeros(size * (rank + 1))
    lengths = [r + 1 for r in range(size)]
    dist.all_to_all_single(
        uneven, mine(rank, sum(lengths)), [rank + 1] * size, lengths, group=group
    )
    return [*targets, even, nothing, uneven]


def send_and_receive(group, rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    found = [torch.zeros(5) for _ in range(4)]
    if rank == 0:
        dist.send(mine(rank), right, group=group)
        dist.recv(found[0], left, group=group)
    else:
        dist.recv(found[0], left, group=group)
        dist.send(mine(rank), right, group=group)
    # Everyone sends first, and the messages of one edge keep their order.
    works = [dist.isend(mine(rank) + n, right, group=group) for n in (1, 2)]
    works += [dist.irecv(tensor, left, group=group) for tensor in found[1:3]]
    pair = [
        dist.P2POp(dist.isend, mine(rank, 5), right, group=group),
        dist.P2POp(dist.irecv, found[3], left, group=group),
    ]
    works += dist.batch_isend_irecv(pair)
    for work in works:
        work.wait()
    return found


def several_at_once(group, rank, size):
    tensors = [mine(rank, 2), mine(rank, 3)]
    with dist.distributed_c10d._coalescing_manager(group=group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    dist.barrier(group=group)
    dist.barrier(group=group, async_op=True).wait()
    # Communication hooks call the group's own methods.
    group.allreduce([tensors[0]]).wait()
    return tensors


def functional(group, rank, size):
    from torch.distributed import _functional_collectives as functional

    reduced = functional.all_reduce(mine(rank, size), "sum", group)
    gathered = functional.all_gather_tensor(mine(rank, 3), 0, group)
    scattered = functional.reduce_scatter_tensor(mine(rank, 3 * size), "sum", 0, group)
    return [reduced + 0, gathered + 0, scattered + 0]


COMPARED = {
    "all_reduce": all_reduce_shapes,
    "async_op": with_a_future,
    "broadcast": broadcast_from_each,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "gather, scatter, reduce": gather_scatter_reduce,
    "all_to_all": all_to_all,
    "send and receive": send_and_receive,
    "coalesced, barrier": several_at_once,
    "functional": functional,
}
NOT_ON_ONE_RANK = {"send and receive"}


def compare(comm, names):
    """The results of both groups by name."""
    groups = dist.new_group(backend="labkit"), dist.new_group(backend="gloo")
    found = {}
    for name in names:
        operation = COMPARED[name]
        found[name] = [operation(group, comm.rank, comm.world_size) for group in groups]
    names = dist.get_backend(groups[0]), groups[0].name()
    dist.destroy_process_group(groups[0])
    return found, names


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_operation_gives_what_gloo_gives(world_size):
    names = [name for name in COMPARED if world_size > 1 or name not in NOT_ON_ONE_RANK]
    for rank, (found, group) in enumerate(run(compare, names, world_size=world_size).values):
        assert group == ("labkit", "labkit")
        for name, (ours, gloos) in found.items():
            assert equal(ours, gloos), (name, rank, ours, gloos)


def test_strided_tensors_are_reduced_in_place():
    """gloo takes the first elements of their storage instead."""

    def strided(comm):
        group = dist.new_group(backend="labkit")
        for tensor in (every_second := mine(comm.rank, 6))[::2], (whole := torch.ones(4, 3))[:, 1]:
            dist.all_reduce(tensor, group=group)
        return every_second.tolist(), whole.tolist()

    for rank, (every_second, whole) in enumerate(run(strided, world_size=2).values):
        own = mine(rank, 6).tolist()
        assert every_second == [10.0, own[1], 14.0, own[3], 18.0, own[5]]
        assert whole == [[1.0, 2.0, 1.0]] * 4


def test_replicas_of_a_sum_are_equal_to_the_bit_and_near_the_exact_one():
    def sums(comm):
        group = dist.new_group(backend="labkit")
        torch.manual_seed(comm.rank)
        x = torch.randn(300_001)
        exact = x.double()
        dist.all_reduce(x, group=group)
        dist.all_reduce(exact)
        return x, exact

    values = run(sums, world_size=3).values
    for x, exact in values:
        assert torch.equal(x, values[0][0])
        torch.testing.assert_close(x.double(), exact, rtol=0, atol=1e-6)


# Refusals


def refused(comm):
    group, x, MAX = dist.new_group(backend="labkit"), torch.ones(3), dist.ReduceOp.MAX
    calls = {
        "BAND of floats": lambda: dist.all_reduce(x, dist.ReduceOp.BAND, group=group),
        "integer mean": lambda: dist.all_reduce(x.int(), dist.ReduceOp.AVG, group=group),
        "sparse maximum": lambda: dist.all_reduce(x.to_sparse(), MAX, group=group),
        "sparse rows": lambda: dist.all_reduce(x[None].to_sparse_csr(), group=group),
        "expanded": lambda: dist.all_reduce(torch.ones(1).expand(3), group=group),
        "scaled sum": lambda: dist.all_reduce(x, dist._make_nccl_premul_sum(2.0), group=group),
        "outputs too large": lambda: dist.all_gather([torch.zeros(4)] * 2, x, group=group),
    }
    texts = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            texts[name] = str(error)
    # A refusal before anything is posted leaves the group usable, however slow a rank is.
    time.sleep(0.4 * comm.rank)
    dist.all_reduce(x, group=group)
    return texts, x.tolist()


REFUSALS = {
    "BAND of floats": "cannot take the band of float32 over ranks",
    "integer mean": "cannot take the mean of int32",
    "sparse maximum": "cannot take the max of a torch.sparse_coo tensor over ranks",
    "sparse rows": "only the sum of sparse_coo is supported; use .to_sparse_coo(), or .to_dense()",
    "expanded": "its elements share memory",
    "scaled sum": 'the "labkit" backend has the reductions SUM, AVG,',
    "outputs too large": "sends is float32 [3], but the output for it is float32 [4]",
}


def test_what_is_not_served_says_so_by_name_and_harms_nothing():
    by_rank = run(refused, world_size=2).values
    for rank, (texts, total) in enumerate(by_rank):
        assert total == [2.0] * 3
        for name, words in REFUSALS.items():
            assert words in texts.get(name, "not refused"), (rank, name)


# Groups


def groups_of_all_kinds(comm):
    threads, outside = threading.active_count(), dist.GroupMember.NON_GROUP_MEMBER
    pairs = [dist.new_group([a, b], backend="labkit") for a, b in ((0, 1), (1, 2), (0, 2))]
    everyone = dist.new_group(backend="labkit")
    found = []
    for group in (*pairs, everyone):
        if group is not outside:
            dist.all_reduce(x := torch.tensor([1.0 + comm.rank]), group=group)
            found.append((dist.get_group_rank(group, comm.rank), dist.get_world_size(group), x))
    both = dist.new_group([2, 0], backend="labkit")
    if comm.rank != 1:
        y = torch.tensor([float(comm.rank)])
        dist.broadcast(y, 2, group=both)
        found.append(y)
    dist.barrier(group=everyone)
    groups = [group for group in (everyone, both, *pairs) if group is not outside]
    assert len({group.group_name for group in groups}) == len(groups)
    # Each is ended on its own, in another order than they were made.
    for group in groups:
        dist.destroy_process_group(group)
    return found, threading.active_count() - threads


def test_sub_groups_keep_apart_and_end_one_by_one():
    values = run(groups_of_all_kinds, world_size=3).values
    pairs = {0: [(0, 3.0), (0, 4.0)], 1: [(1, 3.0), (0, 5.0)], 2: [(1, 5.0), (1, 4.0)]}
    for rank, (found, threads_left) in enumerate(values):
        totals = [(place, size, x.item()) for place, size, x in found[:3]]
        assert totals == [*((place, 2, total) for place, total in pairs[rank]), (rank, 3, 6.0)]
        assert [y.item() for y in found[3:]] == ([] if rank == 1 else [2.0])
        assert threads_left == 0


def again_and_again(comm):
    """Returns threads and open files after each of several groups; errors of use after the end."""
    left = []
    for _ in range(4):
        before = threading.active_count(), open_descriptors()
        group = dist.new_group(backend="labkit")
        large = torch.ones(100_000)
        works = [dist.all_reduce(large, group=group, async_op=True) for _ in range(5)]
        dist.isend(torch.ones(1), 1 - comm.rank, group=group)
        dist.irecv(torch.ones(1), 1 - comm.rank, group=group)
        dist.destroy_process_group(group)
        assert all(work.is_completed() for work in works)
        after = threading.active_count(), open_descriptors()
        left.append((after[0] - before[0], after[1] - before[1]))
    try:
        group.allreduce([torch.ones(1)], dist.AllreduceOptions())
    except ValueError as error:
        return left, str(error)


def test_a_destroyed_group_leaves_no_thread_and_no_open_file():
    for left, text in run(again_and_again, world_size=2).values:
        # PyTorch may keep a socket of the store for the first group.
        assert left[1:] == [(0, 0)] * 3
        assert "this process group was destroyed" in text


def receipts(comm):
    """An empty queue keeps no tensor alive."""
    group = dist.new_group(backend="labkit")
    tensor = torch.ones(10)
    seen = weakref.ref(tensor)
    dist.all_reduce(tensor, group=group)
    del tensor
    gc.collect()
    return wait_until(lambda: seen() is None, 5)


def test_a_tensor_is_let_go_after_its_operation():
    assert run(receipts, world_size=2).values == [True, True]


def asks_from_two_threads(comm):
    """Concurrent calls from several threads of one rank neither overlap nor get lost."""
    group = dist.new_group(backend="labkit")
    inside, most = [], []

    def count(comm, tensor):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.001)
        inside.pop()
        # No messages: the threads of two ranks may come in different orders.
        return tensor

    labkit.backend.use(count)
    calls = [
        partial(dist.all_reduce, torch.ones(1), group=group, async_op=n == 2) for n in range(3)
    ]
    threads = [threading.Thread(target=lambda c=call: [c() for _ in range(20)]) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dist.barrier(group=group)
    labkit.backend.use(None)
    return len(most), max(most)


def test_calls_of_several_threads_take_turns():
    assert run(asks_from_two_threads, world_size=2).values == [(60, 1)] * 2


def leaves_in_between(comm):
    """sys.exit in an asynchronous call: its wait raises it, and the next call is carried out."""
    group = dist.new_group(backend="labkit")
    labkit.backend.use(lambda comm, tensor: sys.exit(3))
    leaving = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    try:
        leaving.wait()
    except SystemExit as error:
        code = error.code
    labkit.backend.use(lambda comm, tensor: tensor + 1)
    following = dist.all_reduce(tensor := torch.ones(1), group=group, async_op=True)
    following.wait(timedelta(seconds=10))
    labkit.backend.use(None)
    return code, tensor.item()


def test_an_exit_inside_a_call_does_not_end_the_groups_thread():
    assert run(leaves_in_between, world_size=2).values == [(3, 2.0)] * 2


def over_gloo(comm):
    """As on several machines, where the ranks cannot map one memory."""
    from labkit.comm import meeting

    meeting.meet = lambda *_: None
    found, _ = compare(
        comm, ["all_reduce", "all_gather", "gather, scatter, reduce", "send and receive"]
    )
    return [equal(ours, gloos) for ours, gloos in found.values()]


def test_without_shared_memory_it_runs_over_gloo():
    assert run(over_gloo, world_size=3).values == [[True] * 4] * 3


# Training


class Net(nn.Module):
    """Layers of several sizes, one of which only odd steps use."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 30), nn.ReLU())
        self.seldom = nn.Linear(30, 30)
        self.norm = nn.BatchNorm1d(30)
        self.out = nn.Linear(30, 2)

    def forward(self, x, use_all=True):
        x = self.layers(x)
        return self.out(self.norm(self.seldom(x) if use_all else x))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(8, 20, generator=generator)


def train(group, rank, steps=3, hook=None, part_of_the_time=False, accumulate=False, **options):
    model = DistributedDataParallel(Net(), process_group=group, **options)
    if hook is not None:
        model.register_comm_hook(*hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    grads = []
    for step in range(steps):
        use_all = not part_of_the_time or step % 2 == 1
        if accumulate:
            with model.no_sync():
                model(batch(rank, step)).pow(2).sum().backward()
        model(batch(rank, 50 + step), use_all).pow(2).sum().backward()
        grads += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return grads, [p.detach().clone() for p in model.parameters()]


WAYS = {
    "plain": {},
    "small buckets": {"bucket_cap_mb": 0.01},
    "buckets as gradients": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
    "unused parameters": {"find_unused_parameters": True, "part_of_the_time": True},
    "accumulation": {"accumulate": True},
}


def distance(tensors, others):
    """The relative distance of all parameters together: those that BatchNorm cancels are noise."""
    one, other = (torch.cat([t.flatten() for t in group]) for group in (tensors, others))
    return ((one - other).norm() / other.norm()).item()


def train_all_ways(comm):
    ours, gloos = dist.new_group(backend="labkit"), dist.new_group(backend="gloo")
    found = {}
    for name, options in WAYS.items():
        found[name] = [train(group, comm.rank, **options) for group in (ours, gloos)]
    hook = {"hook": (comm, labkit.backend.ddp_hook), "bucket_cap_mb": 0.01}
    before = comm.messages
    found["hook"] = [train(gloos, comm.rank, **hook), found["small buckets"][1]]
    assert comm.messages > before
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_ddp_gives_gloos_gradients_and_replicas_equal_to_the_bit(world_size):
    by_rank = run(train_all_ways, world_size=world_size).values
    for found in by_rank:
        for name, ((grads, parameters), (gloos_grads, gloos_parameters)) in found.items():
            assert len(grads) == len(gloos_grads) > 0
            for ours, other in ((grads, gloos_grads), (parameters, gloos_parameters)):
                assert distance(ours, other) < 1e-5, name
            for replica, first in zip(parameters, by_rank[0][name][0][1]):
                assert torch.equal(replica, first), name


def train_with_mine(comm):
    """Train with the learner's function, or without; returns what it was given, and the result."""
    calls = []

    def my_all_reduce(comm, tensor):
        calls.append((tensor.dim(), tensor.is_contiguous(), tensor.requires_grad))
        return tree_all_reduce(comm, tensor)

    def returns_another(comm, tensor):
        return ring_all_reduce(comm, tensor.clone())

    group = dist.new_group(backend="labkit")
    expected = train(group, comm.rank)[1]
    found = {}
    try:
        for use in (my_all_reduce, returns_another):
            labkit.backend.use(use)
            found[use.__name__] = close(train(group, comm.rank)[1], expected)
        labkit.backend.use(my_all_reduce)
        calls_of_ddp = list(calls)
        dist.all_reduce(matrix := torch.ones(2, 3).t(), group=group)
        dist.all_reduce(average := torch.ones(3), dist.ReduceOp.AVG, group=group)
        dist.all_reduce(highest := torch.ones(3), dist.ReduceOp.MAX, group=group)
        labkit.backend.ddp_hook(comm, Bucket())
    finally:
        labkit.backend.use(None)
    count = len(calls)
    found["restored"] = close(train(group, comm.rank)[1], expected) and len(calls) == count
    values = matrix.unique().tolist(), average.tolist(), highest.tolist()
    return found, calls_of_ddp, calls[len(calls_of_ddp) :], values


class Bucket:
    def buffer(self):
        return torch.ones(4)


def close(parameters, expected):
    return all(map(torch.allclose, parameters, expected))


def test_the_learners_ring_trains():
    for found, calls_of_ddp, other_calls, values in run(train_with_mine, world_size=2).values:
        assert found == {"my_all_reduce": True, "returns_another": True, "restored": True}
        # Three steps, one bucket each; PyTorch may ask for more, never for less.
        assert len(calls_of_ddp) >= 3
        assert set(calls_of_ddp) == {(1, True, False)}
        # The matrix, the mean and the hook's bucket; a maximum is not a sum.
        assert other_calls == [(1, True, False)] * 3
        assert values == ([2.0], [1.0] * 3, [1.0] * 3)


@pytest.mark.parametrize("wrong", [3, "ring"])
def test_what_is_no_function_cannot_be_used(wrong):
    with pytest.raises(ValueError, match=r"use\(\) takes a function of comm and tensor"):
        labkit.backend.use(wrong)


def learners_faults(comm):
    texts = []
    for fault in (raises_on_rank_1, returns_too_little):
        group = dist.new_group(backend="labkit")
        labkit.backend.use(fault)
        try:
            train(group, comm.rank)
        except Exception as error:
            texts.append(str(error))
        finally:
            labkit.backend.use(None)
    return texts


def raises_on_rank_1(comm, tensor):
    if comm.rank == 1:
        raise KeyError("my mistake")
    return ring_all_reduce(comm, tensor)


def returns_too_little(comm, tensor):
    return tensor[:1]


def test_a_learners_fault_surfaces_on_every_rank():
    for raised, too_little in run(learners_faults, world_size=3).values:
        assert "KeyError: 'my mistake'" in raised
        assert "the result of returns_too_little is float32 [1]" in too_little


# Plain processes: no launcher of ours watches them


def reduces_until_killed(rank):
    for number in range(1000):
        if rank == 1 and number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(100_000))


def trains_until_killed(rank):
    threads = []
    if rank == 1:
        threads.append(threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)))
        threads[0].start()
    train(None, rank, steps=100_000, bucket_cap_mb=0.01)


def waits_until_killed(rank):
    x = torch.ones(10)
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        dist.recv(x, 1)
    # Rank 2 needs nothing from rank 0: it has to notice rank 1's end, or hear it from rank 0.
    dist.broadcast(x, 0)


@pytest.mark.parametrize("killed", [reduces_until_killed, trains_until_killed, waits_until_killed])
def test_a_kill_ends_the_others_with_an_error(tmp_path, killed):
    started_s = time.monotonic()
    outcomes = plain(tmp_path, killed, world_size=3, patience_s=20.0)
    assert time.monotonic() - started_s < 15
    assert outcomes[1] == (-signal.SIGKILL, None)
    for code, outcome in (outcomes[0], outcomes[2]):
        assert code == 0
        assert "PeerLostError" in outcome
    assert "the process of rank 1" in outcomes[0][1]


def other_shape(rank):
    dist.all_reduce(torch.ones(3 + rank))


def other_dtype_of_one_size(rank):
    dist.all_reduce(torch.ones(3, dtype=[torch.float32, torch.int32][rank]))


def other_order(rank):
    calls = [lambda: dist.all_reduce(torch.ones(3)), lambda: dist.broadcast(torch.ones(3), 0)]
    for call in calls if rank == 0 else reversed(calls):
        call()


def other_root(rank):
    dist.broadcast(torch.ones(3), rank)


def other_reduction(rank):
    dist.all_reduce(torch.ones(3), [dist.ReduceOp.SUM, dist.ReduceOp.MAX][rank])


def other_message(rank):
    if rank == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.ones(2, 2), 0)


MISMATCHES = {
    other_shape: ("2. fast_ring_all_reduce float32 [3] sum", "float32 [4] sum"),
    other_dtype_of_one_size: ("all_reduce float32 [3] sum", "all_reduce int32 [3] sum"),
    other_order: ("1. barrier, 2. fast_ring_all_reduce", "1. barrier, 2. broadcast"),
    other_root: ("broadcast float32 [3] from rank 0", "broadcast float32 [3] from rank 1"),
    other_reduction: ("float32 [3] sum", "float32 [3] max"),
    other_message: ("rank 0 sends float32 [3], at", "receives into float32 [2, 2], at"),
}


@pytest.mark.parametrize("fault", MISMATCHES, ids=lambda fault: fault.__name__)
def test_a_mismatch_shows_both_sides_on_every_rank(tmp_path, fault):  # rows 6 to 8
    for code, outcome in plain(tmp_path, fault, patience_s=20.0):
        assert code == 0
        assert "MismatchError" in outcome
        for words in MISMATCHES[fault]:
            assert words in outcome
        if fault is other_message:
            assert outcome.count("test_backend.py") == 2


def one_call_more(rank):
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        dist.all_reduce(torch.ones(3))
    return "fine"


def one_call_more_of_a_rank_that_lives_on(rank):
    dist.all_reduce(torch.ones(3))
    if rank == 0:
        dist.all_reduce(torch.ones(3))
    dist.destroy_process_group()
    time.sleep(1.5)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return "fine"


@pytest.mark.slow
@pytest.mark.parametrize("fault", [one_call_more, one_call_more_of_a_rank_that_lives_on])
def test_one_call_more_shows_both_sequences(tmp_path, fault):  # row 8
    (_, more), (_, fine) = plain(tmp_path, fault, patience_s=20.0)
    assert fine == "fine"
    assert "PeerLostError: a rank left before fast_ring_all_reduce: rank 1 has left" in more
    call = "fast_ring_all_reduce float32 [3] sum"
    assert f"rank 0: 1. barrier, 2. {call}, 3. {call}" in more
    assert f"rank 1: 1. barrier, 2. {call}" in more


def goes_on_after_an_error_of_another(rank):
    """Rank 1 catches its error and continues: the other ranks still get an error."""
    if rank == 1:
        labkit.backend.use(raises_on_rank_1)
    try:
        dist.all_reduce(torch.ones(3))
    except (KeyError, MismatchError, PeerLostError) as error:
        time.sleep(1)
        return str(error)


def test_a_rank_that_catches_its_error_does_not_leave_the_others_waiting(tmp_path):
    outcomes = plain(tmp_path, goes_on_after_an_error_of_another, world_size=3, patience_s=15.0)
    assert [code for code, _ in outcomes] == [0, 0, 0]
    assert all(outcome for _, outcome in outcomes)


def is_interrupted(rank):
    """Ctrl-C hits rank 1 inside a call."""
    labkit.backend.use(interrupted_on_rank_1)
    try:
        dist.all_reduce(torch.ones(3))
    except KeyboardInterrupt:
        time.sleep(1)
        return "interrupted"


def interrupted_on_rank_1(comm, tensor):
    if comm.rank == 1:
        raise KeyboardInterrupt
    return ring_all_reduce(comm, tensor)


def test_an_interrupt_inside_a_call_ends_the_others_calls(tmp_path):
    outcomes = plain(tmp_path, is_interrupted, world_size=3, patience_s=15.0)
    assert outcomes[1] == (0, "interrupted")
    for code, outcome in (outcomes[0], outcomes[2]):
        assert code == 0
        assert "rank 1 gave up (KeyboardInterrupt" in outcome


def forks(rank):
    """A forked child that runs its exit handlers does not end the rank's queues."""
    if rank == 1:
        child = os.fork()
        if child == 0:
            labkit.backend.group.abandon_all()
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.4)
    dist.all_reduce(x := torch.ones(3))
    return x.tolist()


def test_the_end_of_a_forked_child_is_not_the_end_of_its_rank(tmp_path):
    assert plain(tmp_path, forks) == [(0, [2.0] * 3)] * 2


def initialises_again(path, rank):
    for number in range(3):
        dist.destroy_process_group()
        # The same store each time, as under torchrun.
        store = dist.FileStore(path, 2)
        dist.init_process_group("labkit", store=store, rank=rank, world_size=2)
        dist.all_reduce(x := torch.full((3,), float(rank + number)))
        assert x.tolist() == [2.0 * number + 1] * 3
    return "fine"


def test_a_second_init_on_the_same_store(tmp_path):
    again = partial(initialises_again, str(tmp_path / "store"))
    assert plain(tmp_path, again) == [(0, "fine")] * 2


# Fresh interpreters


def fresh(folder, script, *arguments, **environment):
    """[(exit code, output)] of two processes that run a script as the ranks of one group."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(script))
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(folder / "store"), str(rank), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | environment,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs)]


@pytest.mark.fresh
class TestFreshProcesses:
    def test_either_import_order_and_an_end_without_destroy(self, tmp_path):
        """With operations under way, and with all of PyTorch's debugging switched on."""
        script = """
            import sys
            rank = int(sys.argv[2])
            if rank == 0:
                import labkit
                import torch
            else:
                import torch.distributed
                import labkit
            import torch.distributed as dist
            store = dist.FileStore(sys.argv[1], 2)
            dist.init_process_group("labkit", store=store, rank=rank, world_size=2)
            x = torch.ones(3)
            dist.all_reduce(x)
            print(x.tolist(), dist.get_backend())
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
            model(x).sum().backward()
            print(model.module.weight.grad.tolist())
            for _ in range(30):
                dist.all_reduce(torch.ones(1_000_000), async_op=True)
            if rank == 0:
                dist.all_reduce(x, async_op=True)
            """
        for code, output in fresh(tmp_path, script, TORCH_DISTRIBUTED_DEBUG="DETAIL"):
            assert (code, output) == (0, "[2.0, 2.0, 2.0] labkit\n[[2.0, 2.0, 2.0]]\n")

    def test_a_kill_gives_an_error_and_no_crash(self, tmp_path):
        script = """
            import os, sys
            import labkit, torch
            import torch.distributed as dist
            rank = int(sys.argv[2])
            store = dist.FileStore(sys.argv[1], 2)
            dist.init_process_group("labkit", store=store, rank=rank, world_size=2)
            model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
            for step in range(10):
                if rank == 1 and step == 5:
                    os.kill(os.getpid(), 9)
                model(torch.ones(2, 3)).sum().backward()
            """
        (code, output), (killed, _) = fresh(tmp_path, script)
        assert (code, killed) == (1, -9)
        assert "PeerLostError" in output
        assert "the process of rank 1" in output
        assert "terminate called" not in output

    def test_torchrun_with_several_groups_and_runs_one_after_the_other(self, tmp_path):
        program = tmp_path / "program.py"
        program.write_text(
            textwrap.dedent("""
            import sys
            import labkit
            import torch
            import torch.distributed as dist

            def sums(comm, number):
                x = torch.full((3,), float(comm.rank + number))
                return labkit.collectives.fast_ring_all_reduce(comm, x)[0].item()

            found = []
            for number in range(3):
                dist.init_process_group("labkit")
                rank = dist.get_rank()
                dist.all_reduce(x := torch.full((3,), float(rank + number)))
                found.append(x[0].item())
                dist.destroy_process_group()
            for number in range(3):
                found += labkit.run(sums, number, world_size=2).values
            sys.stdout.write(f"{found}\\n")
            """)
        )
        launch = [warm_python.command(), "-m", "torch.distributed.run"]
        launch += ["--nproc-per-node", "2", program]
        done = subprocess.run(launch, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        sums = [1.0, 3.0, 5.0, 1.0, 1.0, 3.0, 3.0, 5.0, 5.0]
        assert done.stdout.splitlines() == [str(sums)] * 2
