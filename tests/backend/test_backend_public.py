"""Every public function of ``torch.distributed``, with the same inputs under "labkit" and "gloo".

The functions are listed when the test runs: one that a new PyTorch brings fails the test until it
has a case here.
"""

import inspect
import warnings
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import equal, plain
from torch.distributed import distributed_c10d

from labkit.engine.comm import rendezvous

CASES = {}
# Every run of this test begins and ends with two of them; no backend is asked by the others.
NOT_CALLED = {
    *("breakpoint", "destroy_process_group", "init_process_group", "register_rendezvous_handler"),
    *("rendezvous", "get_backend", "get_backend_config", "get_backend_impl", "get_debug_level"),
    *("get_default_backend_for_device", "get_global_rank", "get_group_rank"),
    *("get_node_local_rank", "get_pg_count", "get_process_group_ranks", "get_rank"),
    *("get_world_size", "is_available", "is_backend_available", "is_gloo_available"),
    *("is_initialized", "is_mpi_available", "is_nccl_available", "is_torchelastic_launched"),
    *("is_ucc_available", "is_xccl_available", "set_debug_level", "set_debug_level_from_env"),
    "supports_complex",
}
# Where labkit differs from gloo, and why.
DIFFERENT = {
    "gather_single": "gloo has none",
    "gather_into_tensor": "an older name of gather_single",
}


# PyTorch's own alias says that it is deprecated whenever it is looked at.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning")


def case(function):
    CASES[function.__name__] = function
    return function


def public():
    """The names of all public functions."""
    names = {name for name in dir(dist) if not name.startswith("_")}
    names |= set(distributed_c10d.__all__)
    return {name for name in names if inspect.isroutine(function_of(name))}


def function_of(name):
    return getattr(dist, name, None) or getattr(distributed_c10d, name)


def mine(rank, size=4):
    return torch.arange(size) + 10.0 * rank


def zeros(number, length=4):
    return [torch.zeros(length) for _ in range(number)]


def works_and_tensors(works, tensors):
    for work in works:
        work.wait()
    return tensors


# Collectives


@case
def all_reduce(rank, size):
    ops = ("SUM", "AVG", "PRODUCT", "MAX", "MIN")
    tensors = [mine(rank) for _ in ops]
    for name, tensor in zip(ops, tensors):
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
    whole = [torch.tensor([12, 10, 7]) + rank for _ in range(3)]
    for name, tensor in zip(("BAND", "BOR", "BXOR"), whole):
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
    sparse = torch.eye(3)[[rank, 2]].to_sparse()
    dist.all_reduce(sparse)
    later = mine(rank)
    dist.all_reduce(later, async_op=True).wait()
    return tensors + whole + [sparse.to_dense(), later]


@case
def all_reduce_coalesced(rank, size):
    tensors = [mine(rank, 3), mine(rank, 5)]
    dist.all_reduce_coalesced(tensors, dist.ReduceOp.MAX)
    dist.all_reduce_coalesced(tensors, async_op=True).wait()
    return tensors


@case
def broadcast(rank, size):
    dist.broadcast(tensor := mine(rank), size - 1)
    return tensor


@case
def reduce(rank, size):
    dist.reduce(tensor := mine(rank), 0, dist.ReduceOp.PRODUCT)
    return tensor if rank == 0 else None


@case
def all_gather(rank, size):
    dist.all_gather(found := zeros(size), mine(rank))
    return found


@case
def all_gather_coalesced(rank, size):
    found = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(size)]
    tensors = [mine(rank, 3), mine(rank).view(2, 2)]
    dist.all_gather_coalesced(found, tensors)
    again = [[torch.zeros(3), torch.zeros(2, 2)] for _ in range(size)]
    dist.all_gather_coalesced(again, tensors, async_op=True).wait()
    return found + again


def _all_gather_whole(function, rank, size):
    function(found := torch.zeros(4 * size), mine(rank))
    return found


def _gather_whole(function, rank, size):
    function(mine(rank), found := torch.zeros(4 * size) if rank == 0 else None)
    return found


def _scatter_sums(function, rank, size):
    function(found := torch.zeros(4), mine(rank, 4 * size))
    return found


for _name in ("all_gather_into_tensor", "all_gather_single"):
    CASES[_name] = partial(_all_gather_whole, getattr(dist, _name))
for _name in ("gather_into_tensor", "gather_single"):
    CASES[_name] = partial(_gather_whole, getattr(dist, _name))
for _name in ("reduce_scatter_tensor", "reduce_scatter_single"):
    CASES[_name] = partial(_scatter_sums, getattr(dist, _name))


@case
def gather(rank, size):
    dist.gather(mine(rank), found := zeros(size) if rank == 0 else None)
    return found


@case
def scatter(rank, size):
    shares = [mine(other) for other in range(size)] if rank == 1 else None
    dist.scatter(found := torch.zeros(4), shares, 1)
    return found


@case
def reduce_scatter(rank, size):
    dist.reduce_scatter(found := torch.zeros(4), [mine(rank) + r for r in range(size)])
    return found


@case
def all_to_all(rank, size):
    dist.all_to_all(found := zeros(size), [mine(rank) + 100 * r for r in range(size)])
    return found


@case
def all_to_all_single(rank, size):
    dist.all_to_all_single(found := torch.zeros(2 * size), mine(rank, 2 * size))
    lengths = [rank + other + 1 for other in range(size)]
    uneven = torch.zeros(sum(lengths))
    dist.all_to_all_single(uneven, mine(rank, sum(lengths)), lengths, lengths)
    return [found, uneven]


@case
def barrier(rank, size):
    dist.barrier()
    return dist.barrier(async_op=True).wait()


@case
def monitored_barrier(rank, size):
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)


# Point-to-point: out of order by tag, from any source


@case
def send(rank, size):
    if rank == 0:
        works = [dist.isend(mine(tag), 1, tag=tag) for tag in (7, 5)]
        dist.send(mine(9), 1, tag=9)
        return works_and_tensors(works, None)
    if rank == 1:
        found = zeros(3)
        return [dist.recv(t, 0, tag=tag) for t, tag in zip(found, (5, 9, 7))], found
    return None


@case
def recv(rank, size):
    if rank > 0:
        dist.send(mine(rank), 0, tag=3)
        return None
    pairs = [(torch.zeros(4), None) for _ in range(size - 1)]
    return sorted((dist.recv(tensor, tag=3), tensor.tolist()) for tensor, _ in pairs)


@case
def isend(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    found = zeros(3)
    works = [dist.isend(mine(rank) + n, right, tag=n) for n in range(3)]
    works += [dist.irecv(found[n], left, tag=n) for n in (2, 0, 1)]
    return works_and_tensors(works, found)


@case
def irecv(rank, size):
    """Posted before anything is sent."""
    found = zeros(2)
    works = [dist.irecv(found[0], tag=1), dist.irecv(found[1], (rank - 1) % size, tag=2)]
    works += [dist.isend(mine(rank) + tag, (rank + 1) % size, tag=tag) for tag in (2, 1)]
    return works_and_tensors(works, found)


@case
def batch_isend_irecv(rank, size):
    found = zeros(2)
    pairs = [
        dist.P2POp(dist.irecv, found[0], (rank - 1) % size),
        dist.P2POp(dist.isend, mine(rank), (rank + 1) % size),
        dist.P2POp(dist.isend, mine(rank) + 1, (rank + 1) % size),
        dist.P2POp(dist.irecv, found[1], (rank - 1) % size),
    ]
    return works_and_tensors(dist.batch_isend_irecv(pairs), found)


# Objects


@case
def all_gather_object(rank, size):
    dist.all_gather_object(found := [None] * size, {"rank": rank, "more": "x" * rank})
    return found


@case
def gather_object(rank, size):
    dist.gather_object([rank], found := [None] * size if rank == 0 else None)
    return found


@case
def broadcast_object_list(rank, size):
    dist.broadcast_object_list(found := [rank, {"of": rank}], 1)
    return found


@case
def scatter_object_list(rank, size):
    dist.scatter_object_list(found := [None], [[r] for r in range(size)] if rank == 0 else None)
    return found


@case
def send_object_list(rank, size):
    found = [None, None]
    if rank == 0:
        dist.send_object_list([{"a": 1}, "b"], 1)
    if rank == 1:
        dist.recv_object_list(found, 0)
    return found


@case
def recv_object_list(rank, size):
    found = [None]
    if rank == 0:
        dist.send_object_list([{"to": 1}], 1)
    return (dist.recv_object_list(found, 0), found) if rank == 1 else None


# Groups


def _of_group(group, rank):
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return "outside"
    dist.all_reduce(tensor := mine(rank), group=group)
    return tensor, dist.get_process_group_ranks(group), dist.get_group_rank(group, rank)


@case
def new_group(rank, size):
    return _of_group(dist.new_group([1, 0], use_local_synchronization=False), rank)


@case
def new_subgroups(rank, size):
    return _of_group(dist.new_subgroups(1)[0], rank)


@case
def new_subgroups_by_enumeration(rank, size):
    return _of_group(
        dist.new_subgroups_by_enumeration([[0, 1], [*range(2, size)]][: size - 1])[0], rank
    )


@case
def split_group(rank, size):
    groups = [dist.split_group(split_ranks=[[1, 0]]), dist.split_group(split_ranks=[[0], [1]])]
    return [_of_group(group, rank) for group in groups]


@case
def shrink_group(rank, size):
    dist.shrink_group([size - 1])


@case
def init_device_mesh(rank, size):
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    return _of_group(mesh.get_group("b"), rank), mesh["b"].size(), mesh.get_coordinate()


@case
def record_comm(rank, size):
    with dist.record_comm("named"):
        dist.all_reduce(tensor := mine(rank))
    return tensor


@case
def set_timeout(rank, size):
    dist.set_timeout(timedelta(seconds=40))
    dist.all_reduce(tensor := mine(rank))
    return tensor


def walk(names, size, store, rank):
    """By name: ("gives", the result), or ("refuses", the error)."""
    warnings.simplefilter("ignore")
    if store:
        # As on several machines, where the ranks cannot map one memory.
        rendezvous.map_arena = lambda *_: None
        dist.destroy_process_group()
        group = {"store": dist.FileStore(store, size), "rank": rank, "world_size": size}
        dist.init_process_group("labkit", timeout=timedelta(seconds=30), **group)
    found = {}
    for name in names:
        try:
            found[name] = "gives", CASES[name](rank, size)
        except Exception as error:
            found[name] = "refuses", f"{type(error).__name__}: {error}"
        # The ranks begin each case together, so that a failure does not affect the next case.
        dist.barrier()
    return found


def test_every_public_function_has_a_case():
    assert public() - CASES.keys() - NOT_CALLED == set()


@pytest.mark.parametrize(("world_size", "shares_memory"), [(2, True), (3, True), (3, False)])
def test_every_public_function_does_what_it_does_on_gloo(tmp_path, world_size, shares_memory):
    # After these a group without common memory ends when its timeout does.
    from_any = () if shares_memory else ("recv", "irecv")
    names = sorted((CASES.keys() & public()).difference(from_any))
    by_backend = {}
    for backend in ("labkit", "gloo"):
        (folder := tmp_path / backend).mkdir()
        other = backend == "labkit" and not shares_memory
        ask = partial(walk, names, world_size, str(tmp_path / "store") * other)
        by_backend[backend] = plain(folder, ask, world_size, backend, timeout_s=30)
    for rank, ((code, ours), (gloos_code, gloos)) in enumerate(zip(*by_backend.values())):
        assert (code, gloos_code) == (0, 0), (ours, gloos)
        different = {n for n in names if ours[n][0] != gloos[n][0]}
        assert different <= DIFFERENT.keys(), {n: (ours[n], gloos[n]) for n in different}
        for name in set(names) - different:
            is_same = ours[name][0] == "refuses" or equal(ours[name][1], gloos[name][1])
            assert is_same, (name, rank, ours[name], gloos[name])


def asks_the_group(rank):
    """What PyTorch's own code asks of a group, beside collectives."""
    group, x, y = dist.group.WORLD, torch.ones(2), torch.ones(3)
    before = group._get_sequence_number_for_group()
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as coalesced:
        dist.all_reduce(x)
        dist.all_reduce(y)
    coalesced.wait()
    dist.all_reduce(x, async_op=True)
    group._wait_for_pending_works()
    calls = group._get_sequence_number_for_group() - before
    dist.barrier()
    group.abort()
    try:
        dist.all_reduce(x)
    except ValueError as error:
        return x.tolist(), y.tolist(), calls, str(error)


def test_coalescing_sequence_numbers_pending_works_and_abort(tmp_path):
    for code, (x, y, calls, text) in plain(tmp_path, asks_the_group):
        assert (code, x, y) == (0, [4.0] * 2, [2.0] * 3)
        # Two all-reduces in one call, or in two.
        assert calls in (2, 3)
        assert "this process group was destroyed" in text
