"""Collectives on real ranks: one device's result on every rank, at the cost of the formula."""

import pytest
import torch
from cases import OPS, on_one_device, paid, reduced, ring_cost, values_of, wide_bytes
from ranks import broadcast_cost, equal

from labkit import run
from labkit.collectives import (
    all_gather,
    all_to_all,
    broadcast,
    direct_all_reduce,
    fast_all_reduce,
    fast_ring_all_reduce,
    gather,
    halving_doubling_all_reduce,
    naive_all_reduce,
    reduce,
    reduce_scatter,
    ring_all_reduce,
    scatter,
    share_only,
    share_reduce,
    tree_all_reduce,
)
from labkit.costs import traffic

WORLD_SIZES = [1, 2, 3, 4]
SIZES = (0, 1, 3, 7, 1000)
ALL_REDUCES = {
    "naive": naive_all_reduce,
    "tree": tree_all_reduce,
    "halving and doubling": halving_doubling_all_reduce,
    "ring": ring_all_reduce,
    "fast ring": fast_ring_all_reduce,
    "direct": direct_all_reduce,
    "fast": fast_all_reduce,
}
CASES = [
    (name, op, dtype, size)
    for name in ALL_REDUCES
    for dtype, ops in OPS.items()
    for op in ops
    for size in SIZES
]
# How a dtype is handled does not depend on the size: not all pairs for each number of ranks.
OF_EACH_KIND = {torch.float16: "mean", torch.float32: "sum", torch.int64: "max"}
FEW_CASES = [case for case in CASES if case[3] == 7 or OF_EACH_KIND.get(case[2]) == case[1]]


def price(name, op, dtype, size, world_size, rank, transport):
    counts = size, dtype.itemsize, world_size, rank
    if name in ("direct", "fast") and transport == "shared":
        return traffic.direct_all_reduce_cost(size, dtype.itemsize, world_size)
    if name == "naive":
        return traffic.naive_all_reduce_cost(*counts)
    if name == "halving and doubling":
        return traffic.halving_doubling_cost(*counts, partial_bytes=wide_bytes(op, dtype))
    if name == "tree":
        # Steps, partial sums sent, results sent: of three ranks the last one hands over and waits.
        of_ranks = {1: [(0, 0, 0)], 2: [(1, 1, 0)] * 2, 4: [(2, 2, 0)] * 4}
        of_ranks[3] = [(3, 1, 1), (1, 1, 0), (2, 1, 0)]
        steps, partial, whole = of_ranks[world_size][rank]
        sizes = partial * wide_bytes(op, dtype) + whole * dtype.itemsize
        return traffic.Cost(steps, partial + whole, size * sizes)
    return ring_cost(op, size, dtype, world_size, rank)


def reduce_cases(comm, cases):
    return [
        paid(comm, ALL_REDUCES[name], values_of(comm.rank, size, dtype), op)
        for name, op, dtype, size in cases
    ]


@pytest.mark.parametrize(
    ("world_size", "transport"), [*((size, "shared") for size in WORLD_SIZES), (3, "gloo")]
)
def test_all_reduce_of_any_dtype_operation_and_size(world_size, transport):  # rows 10, 12
    """The result equals one device's, to the bit on all ranks, at the cost of the formula."""
    cases = CASES if (world_size, transport) == (3, "shared") else FEW_CASES
    by_rank = run(reduce_cases, cases, world_size=world_size, transport=transport).values
    for case, *found in zip(cases, *by_rank, strict=True):
        first, _ = found[0]
        torch.testing.assert_close(first, on_one_device(*case[1:], world_size))
        for rank, (value, cost) in enumerate(found):
            assert value.dtype == first.dtype
            assert torch.equal(value, first), f"replicas differ: {case}"
            assert cost == price(*case, world_size, rank, transport), (case, rank)


def sixteen_bits(comm):
    found = []
    for dtype, large in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        for all_reduce in ALL_REDUCES.values():
            mine = torch.full((5,), large if comm.rank == 0 else 1.0, dtype=dtype)
            found.append(all_reduce(comm, mine).unique().tolist() == [large + 2])
            # The sum is beyond float16; the mean is not.
            mine = torch.full((2,), 60000.0, dtype=dtype)
            found.append(all_reduce(comm, mine, "mean").isfinite().all().item())
    return found


def test_sixteen_bit_floats_do_not_lose_the_small_ones():
    """2048 + 1 is 2048 in float16, however often 1 is added."""
    for found in run(sixteen_bits, world_size=3).values:
        assert found == [True] * 4 * len(ALL_REDUCES)


def rooted_cases(comm, cases):
    found = []
    for root, size, dtype in cases:
        mine = values_of(comm.rank, size, dtype)
        all_of_them = [values_of(7 * dst + 1, size, dtype) for dst in range(comm.world_size)]
        shares = all_of_them if comm.rank == root else None
        found.append(
            {
                "broadcast": paid(comm, broadcast, mine.clone(), root),
                "reduce": paid(comm, reduce, mine.clone(), root, "max"),
                "gather": paid(comm, gather, mine, root),
                "scatter": paid(comm, scatter, shares, torch.empty_like(mine), root),
            }
        )
        assert torch.equal(mine, values_of(comm.rank, size, dtype))
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_collectives_with_a_root(world_size):
    ranks, kinds = range(world_size), (torch.float32, torch.uint8, torch.bfloat16)
    cases = [(root, size, dtype) for root in ranks for size in SIZES for dtype in kinds]
    for rank, found in enumerate(run(rooted_cases, cases, world_size=world_size).values):
        for (root, size, dtype), case in zip(cases, found, strict=True):
            everyones = [values_of(r, size, dtype) for r in ranks]
            at_root = rank == root
            highest = reduced("max", everyones)
            expected = {
                "broadcast": everyones[root],
                "reduce": highest if at_root else everyones[rank],
                "gather": everyones if at_root else None,
                "scatter": values_of(7 * rank + 1, size, dtype),
            }
            counts = size, dtype.itemsize, world_size, rank, root
            num_bytes, others = size * dtype.itemsize, world_size - 1
            broadcast = broadcast_cost(num_bytes, world_size, rank, root)
            sent = 0 if at_root else 1
            prices = {
                "broadcast": broadcast,
                # The same tree backwards.
                "reduce": traffic.Cost(broadcast.steps, sent, sent * num_bytes),
                "gather": traffic.gather_cost(*counts),
                "scatter": traffic.Cost(1, 0, 0),
            }
            if at_root:
                prices["scatter"] = traffic.Cost(others, others, others * num_bytes)
            for name, (value, cost) in case.items():
                assert equal(value, expected[name]), (name, root, size, rank)
                assert cost == prices[name], (name, root, size, rank)


def exchange_cases(comm, cases):
    found = []
    for size, dtype in cases:
        mine = values_of(comm.rank, size, dtype)
        for_all = [values_of(10 * comm.rank + dst, size, dtype) for dst in range(comm.world_size)]
        before = [tensor.clone() for tensor in for_all]
        found.append(
            {
                "all_gather": paid(comm, all_gather, mine),
                "reduce_scatter": paid(comm, reduce_scatter, for_all, "sum"),
                "all_to_all": paid(comm, all_to_all, for_all),
            }
        )
        assert all(map(torch.equal, before, for_all))
    return found


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_collectives_from_everyone_to_everyone(world_size):
    ranks = range(world_size)
    cases = [(size, dtype) for size in SIZES for dtype in (torch.float32, torch.float16)]
    for rank, found in enumerate(run(exchange_cases, cases, world_size=world_size).values):
        for (size, dtype), case in zip(cases, found, strict=True):
            for_me = [values_of(10 * src + rank, size, dtype) for src in ranks]
            expected = {
                "all_gather": [values_of(r, size, dtype) for r in ranks],
                "reduce_scatter": reduced("sum", for_me),
                "all_to_all": for_me,
            }
            others, sizes = world_size - 1, dict.fromkeys(expected, size * dtype.itemsize)
            sizes["reduce_scatter"] = size * wide_bytes("sum", dtype)
            prices = {n: traffic.Cost(others, others, others * s) for n, s in sizes.items()}
            for name, (value, cost) in case.items():
                torch.testing.assert_close(value, expected[name])
                assert cost == prices[name], (name, size, rank)


def test_shapes_strides_and_gradients_of_the_ones_that_return_new_tensors():  # rows 10, 11
    def shapes(comm):
        leaf = torch.arange(6.0).reshape(2, 3).requires_grad_()
        matrix, scalar = (leaf + comm.rank).t(), torch.tensor(comm.rank)
        wide = leaf[:, :1].expand(2, 4)
        found = [*all_gather(comm, matrix), reduce_scatter(comm, [matrix] * 2), *gathered(comm)]
        found += all_to_all(comm, [matrix] * 2) + all_gather(comm, wide)
        assert not any(tensor.requires_grad for tensor in found)
        return [tensor.tolist() for tensor in found], [s.item() for s in all_gather(comm, scalar)]

    def gathered(comm):
        return gather(comm, torch.ones(1, requires_grad=True)) or []

    matrix = torch.arange(6.0).reshape(2, 3).t()
    both = [matrix.tolist(), (matrix + 1).tolist()]
    for rank, (found, scalars) in enumerate(run(shapes, world_size=2).values):
        ones = [[1.0]] * 2 if rank == 0 else []
        wide = [[[0.0] * 4, [3.0] * 4]] * 2
        assert found == [*both, (2 * matrix + 1).tolist(), *ones, *both, *wide]
        assert scalars == [0, 1]


FAULTS = {
    "integer mean": ("mean of int32", lambda x: (x.int(), "mean")),
    "complex max": ("max of complex64", lambda x: (x * 1j, "max")),
    "float8": ("sum of float8_e4m3fn", lambda x: (x.to(torch.float8_e4m3fn),)),
    "bitwise": ("band of float32", lambda x: (x, "band")),
    "sparse": ("use .to_dense()", lambda x: (x.to_sparse(),)),
    "foreign device": ("tensor is on meta: move it with", lambda x: (x.to("meta"),)),
    "expanded": ("its elements share memory", lambda x: (x[:, None].expand(3, 2),)),
    "no tensor": ("a tensor is needed", lambda x: ([1.0, 2.0],)),
}
MORE_FAULTS = {
    "integer mean": ("mean of int32", lambda comm, x: reduce(comm, x.int(), 0, "mean")),
    "expanded": ("share memory", lambda comm, x: scatter(comm, None, x[:1].expand(3))),
    "root": ("is not a rank: with world size", lambda comm, x: gather(comm, x, 9)),
    "other root": ("root True is not a rank", lambda comm, x: broadcast(comm, x, True)),
    "too few": ("chunks for", lambda comm, x: share_only(comm, [x] * (comm.world_size - 1))),
    "too many": ("to send for", lambda comm, x: all_to_all(comm, [x] * (comm.world_size + 1))),
}


def refusals(comm):
    calls = [
        (words, lambda comm, x, f=f, values=values: f(comm, *values(x)))
        for words, values in FAULTS.values()
        for f in ALL_REDUCES.values()
    ]
    calls += MORE_FAULTS.values()
    found = [text_of(call, comm, torch.ones(3)) for _, call in calls]
    missing = [(words, text) for (words, _), text in zip(calls, found) if words not in text]
    # Nothing was sent, and the next collective works.
    return missing, found, comm.messages, ring_all_reduce(comm, torch.ones(3)).tolist()


def text_of(call, *args):
    try:
        call(*args)
    except ValueError as error:
        return str(error)
    return "not refused"


@pytest.mark.parametrize(("world_size", "transport"), [(1, "auto"), (3, "shared"), (3, "gloo")])
def test_what_cannot_be_done_is_refused_alike_on_every_rank_before_any_message(
    world_size, transport
):  # rows 11, 13
    by_rank = run(refusals, world_size=world_size, transport=transport).values
    for missing, texts, messages, total in by_rank:
        assert (missing, messages, total) == ([], 0, [world_size] * 3)
        assert texts == by_rank[0][1]


def shared_memory_faults(comm):
    whole = torch.arange(6.0).view(2, 3)
    rows, columns, one = whole.unbind(0), whole[:, :2].unbind(1), torch.ones(3)
    faults = {
        "all_to_all in place": lambda: all_to_all(comm, rows, rows),
        "all_to_all into one place": lambda: all_to_all(comm, rows, [one, one]),
        "share_only": lambda: share_only(comm, [rows[0], whole.view(-1)[2:5]]),
        "share_reduce": lambda: share_reduce(comm, [one, one]),
    }
    texts = {name: text_of(fault) for name, fault in faults.items()}
    assert (comm.messages, whole.flatten().tolist()) == (0, [0, 1, 2, 3, 4, 5])
    # Parts of one tensor are normal use, and one tensor may be sent to all.
    share_only(comm, columns)
    sent = all_to_all(comm, [rows[0], rows[0]], [rows[1], one])
    return texts, whole.tolist(), [tensor.tolist() for tensor in sent]


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_what_is_received_and_what_is_sent_share_no_memory(transport):
    for texts, _, _ in run(shared_memory_faults, world_size=2, transport=transport).values:
        for name, text in texts.items():
            assert "share memory, and one would be overwritten before it is sent" in text, name
