"""The functions of ``torch.distributed``, with the same inputs under "labkit" and "gloo"."""

import warnings
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from ranks import equal, plain

CASES = {}
# gloo of PyTorch 2.15 has none.
DIFFERENT = {"gather_single", "gather_into_tensor"}


# PyTorch's own alias says that it is deprecated whenever it is looked at.
pytestmark = pytest.mark.filterwarnings("ignore:.*reduce_op.*:FutureWarning")


def case(function):
    CASES[function.__name__] = function
    return function


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
    later = mine(rank)
    dist.all_reduce(later, async_op=True).wait()
    return [*tensors, *whole, later]


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
    if hasattr(dist, _name):
        CASES[_name] = partial(_all_gather_whole, getattr(dist, _name))
for _name in ("gather_into_tensor", "gather_single"):
    if hasattr(dist, _name):
        CASES[_name] = partial(_gather_whole, getattr(dist, _name))
for _name in ("reduce_scatter_tensor", "reduce_scatter_single"):
    if hasattr(dist, _name):
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


# Point-to-point


@case
def send(rank, size):
    if rank == 0:
        work = dist.isend(mine(7), 1)
        dist.send(mine(9), 1)
        work.wait()
        return None
    if rank == 1:
        return [(dist.recv(tensor, 0), tensor) for tensor in zeros(2)]
    return None


@case
def isend(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    found = zeros(3)
    works = [dist.irecv(found[0], left)]
    works += [dist.isend(mine(rank) + n, right) for n in range(3)]
    works += [dist.irecv(tensor, left) for tensor in found[1:]]
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
def init_device_mesh(rank, size):
    mesh = dist.init_device_mesh("cpu", (1, size), mesh_dim_names=("a", "b"))
    return _of_group(mesh.get_group("b"), rank), mesh["b"].size(), mesh.get_coordinate()


@case
def set_timeout(rank, size):
    dist.set_timeout(timedelta(seconds=40))
    dist.all_reduce(tensor := mine(rank))
    return tensor


def walk(names, size, rank):
    """The results by name, or the error."""
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        try:
            found[name] = CASES[name](rank, size)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
        # The ranks begin each case together, so that a failure does not affect the next case.
        dist.barrier()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_function_does_what_it_does_on_gloo(tmp_path, world_size):
    by_backend = {}
    for backend in ("labkit", "gloo"):
        (folder := tmp_path / backend).mkdir()
        ask = partial(walk, CASES, world_size)
        by_backend[backend] = plain(folder, ask, world_size, 60.0, backend, timeout_s=30)
    for rank, ((code, ours), (gloos_code, gloos)) in enumerate(zip(*by_backend.values())):
        assert (code, gloos_code) == (0, 0), (ours, gloos)
        for name in CASES.keys() - DIFFERENT:
            assert equal(ours[name], gloos[name]), (name, rank, ours[name], gloos[name])
