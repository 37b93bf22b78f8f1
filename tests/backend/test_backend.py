"""The backend "labkit": PyTorch's own operations and training on our collectives, next to gloo.

That every function does what it does on gloo: test_backend_public.py. Most of this runs in the
ranks of ``labkit.run``, which hold a gloo group and a labkit group at once. What a user without
labkit's launcher sees is tested in plain processes; they come from the same forkserver, so they
start as fast. Only what concerns the start and the end of an interpreter needs fresh ones.
"""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import open_descriptors, plain, stay
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import labkit
from labkit import run
from labkit.collectives import ring_all_reduce, tree_all_reduce
from labkit.engine.errors import PeerLostError

# Refusals


def refused(comm):
    group, x, MAX = dist.new_group(backend="labkit"), torch.ones(3), dist.ReduceOp.MAX
    calls = {
        "sparse maximum": lambda: dist.all_reduce(x.to_sparse(), MAX, group=group),
        "sparse rows": lambda: dist.all_reduce(x[None].to_sparse_csr(), group=group),
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
    "sparse maximum": "cannot take the max of a torch.sparse_coo tensor over ranks",
    "sparse rows": "only the sum of sparse_coo is supported; use .to_sparse_coo(), or .to_dense()",
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


# Training


class Net(nn.Module):
    """Layers of several sizes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(20, 200), nn.ReLU(), nn.Linear(200, 30), nn.ReLU())
        self.norm = nn.BatchNorm1d(30)
        self.out = nn.Linear(30, 2)

    def forward(self, x):
        return self.out(self.norm(self.layers(x)))


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(8, 20, generator=generator)


def train(group, rank, steps=3, **options):
    model = DistributedDataParallel(Net(), process_group=group, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(steps):
        model(batch(rank, step)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def train_with_mine(comm):
    """Train with the learner's function, or without; returns what it was given, and the result."""
    calls = []

    def my_all_reduce(comm, tensor):
        calls.append((tensor.dim(), tensor.is_contiguous(), tensor.requires_grad))
        return tree_all_reduce(comm, tensor)

    def returns_another(comm, tensor):
        return ring_all_reduce(comm, tensor.clone())

    group = dist.new_group(backend="labkit")
    expected = train(group, comm.rank)
    found = {}
    try:
        for use in (my_all_reduce, returns_another):
            labkit.backend.use(use)
            found[use.__name__] = close(train(group, comm.rank), expected)
        labkit.backend.use(my_all_reduce)
        calls_of_ddp = list(calls)
        dist.all_reduce(matrix := torch.ones(2, 3).t(), group=group)
        dist.all_reduce(average := torch.ones(3), dist.ReduceOp.AVG, group=group)
        dist.all_reduce(highest := torch.ones(3), dist.ReduceOp.MAX, group=group)
        labkit.backend.ddp_hook(comm, Bucket())
    finally:
        labkit.backend.use(None)
    count = len(calls)
    found["restored"] = close(train(group, comm.rank), expected) and len(calls) == count
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


def trains_until_killed(rank):
    threads = []
    if rank == 1:
        threads.append(threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)))
        threads[0].start()
    train(None, rank, steps=100_000, bucket_cap_mb=0.01)


def test_a_kill_ends_the_others_with_an_error(tmp_path):
    outcomes = plain(tmp_path, trains_until_killed, world_size=3)
    assert outcomes[1] == (-signal.SIGKILL, None)
    for code, outcome in (outcomes[0], outcomes[2]):
        assert code == 0
        assert "PeerLostError" in outcome
    assert "the process of rank 1" in outcomes[0][1]


def other_shape(rank):
    dist.all_reduce(torch.ones(3 + rank))


def other_message(rank):
    if rank == 0:
        dist.send(torch.ones(3), 1)
    else:
        dist.recv(torch.ones(2, 2), 0)


MISMATCHES = {
    other_shape: ("2. direct_all_reduce float32 [3] sum", "float32 [4] sum"),
    other_message: ("rank 0 sends float32 [3], at", "receives into float32 [2, 2], at"),
}


@pytest.mark.parametrize("fault", MISMATCHES, ids=lambda fault: fault.__name__)
def test_a_mismatch_shows_both_sides_on_every_rank(tmp_path, fault):  # rows 6 to 8
    for code, outcome in plain(tmp_path, fault):
        assert code == 0
        assert "MismatchError" in outcome
        for words in MISMATCHES[fault]:
            assert words in outcome
        if fault is other_message:
            assert outcome.count("test_backend.py") == 2


def goes_on_after_a_mismatch(rank):
    """Sums that are right on all ranks, after one of other shapes whose error each has caught."""
    with contextlib.suppress(Exception):
        dist.all_reduce(torch.ones(3 + rank))
    stay()
    results = []
    for _ in range(3):
        try:
            dist.all_reduce(values := torch.full((3,), rank + 1.0))
            results.append(values.tolist())
        except PeerLostError as error:
            results.append(str(error))
    return results


def test_after_an_error_on_the_way_a_group_gives_no_results(tmp_path):
    """They would be those of the call before, in silence."""
    for code, outcome in plain(tmp_path, goes_on_after_a_mismatch, world_size=3):
        assert code == 0
        assert str(outcome).count("make the group, or the run, anew") == 3


def is_interrupted(rank):
    """Ctrl-C hits rank 1 inside a call."""
    labkit.backend.use(interrupted_on_rank_1)
    try:
        dist.all_reduce(torch.ones(3))
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        stay()


def interrupted_on_rank_1(comm, tensor):
    if comm.rank == 1:
        raise KeyboardInterrupt
    return ring_all_reduce(comm, tensor)


def test_an_interrupt_inside_a_call_ends_the_others_calls(tmp_path):
    outcomes = plain(tmp_path, is_interrupted, world_size=3)
    assert outcomes[1] == (0, "interrupted")
    for code, outcome in (outcomes[0], outcomes[2]):
        assert code == 0
        assert "rank 1 gave up (KeyboardInterrupt" in outcome


def initializes_again(path, rank):
    for number in range(3):
        dist.destroy_process_group()
        # The same store each time, as under torchrun.
        store = dist.FileStore(path, 2)
        dist.init_process_group("labkit", store=store, rank=rank, world_size=2)
        dist.all_reduce(x := torch.full((3,), float(rank + number)))
        assert x.tolist() == [2.0 * number + 1] * 3
    return "fine"


def test_a_second_init_on_the_same_store(tmp_path):
    again = partial(initializes_again, str(tmp_path / "store"))
    assert plain(tmp_path, again) == [(0, "fine")] * 2


# Fresh interpreters


@pytest.mark.fresh
def test_either_import_order_and_an_end_without_destroy(tmp_path):
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
    (tmp_path / "program.py").write_text(textwrap.dedent(script))
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options["env"] = os.environ | {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    words = [sys.executable, tmp_path / "program.py", tmp_path / "store"]
    for process in [subprocess.Popen([*words, str(rank)], **options) for rank in range(2)]:
        assert process.communicate(timeout=240)[0] == (
            "[2.0, 2.0, 2.0] labkit\n[[2.0, 2.0, 2.0]]\n"
        )
        assert process.returncode == 0
