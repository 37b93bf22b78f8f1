"""All-reduce on real ranks: the right sum, the same everywhere, for the formula's bytes."""

import pytest
import torch
from ranks import travel_by_value

from labkit import run
from labkit.collectives import naive_all_reduce, ring_all_reduce, share_only, share_reduce
from labkit.collectives.ring import split_chunks
from labkit.costs import naive_all_reduce_cost, ring_all_reduce_cost
from labkit.schedules import owned_chunk

travel_by_value(__name__)

ALGORITHMS = [
    pytest.param(naive_all_reduce, naive_all_reduce_cost, id="naive"),
    pytest.param(ring_all_reduce, ring_all_reduce_cost, id="ring"),
]
SIZES = (0, 1, 3, 8, 1001)


def values_of(rank, size, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * rank + size)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def reduce_sizes(comm, algorithm, sizes):
    results, counts = [], []
    for size in sizes:
        before = comm.messages, comm.bytes_sent
        results.append(algorithm(comm, values_of(comm.rank, size)))
        counts.append((comm.messages - before[0], comm.bytes_sent - before[1]))
    return results, counts


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize(("algorithm", "cost"), ALGORITHMS)
def test_sums_of_any_size_and_bytes_of_the_formula(algorithm, cost, world_size):
    result = run(reduce_sizes, algorithm, SIZES, world_size=world_size)
    for index, size in enumerate(SIZES):
        expected = sum(values_of(rank, size) for rank in range(world_size))
        for rank, (results, counts) in enumerate(result.values):
            torch.testing.assert_close(results[index], expected, rtol=1e-12, atol=1e-12)
            assert torch.equal(results[index], result.values[0][0][index]), "replicas differ"
            formula = cost(size, 8, world_size, rank)
            assert counts[index] == (formula.messages, formula.num_bytes)


def test_the_formula_is_the_famous_one_where_p_divides():
    for world_size in (1, 2, 3, 4):
        size_bytes = 12 * 1000 * 4
        cost = ring_all_reduce_cost(12 * 1000, 4, world_size)
        assert cost.num_bytes == 2 * (world_size - 1) * size_bytes // world_size
        assert cost.steps == cost.messages == 2 * (world_size - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bfloat16, torch.uint8])
def test_other_dtypes(dtype):
    def reduce(comm):
        return ring_all_reduce(comm, torch.arange(5).to(dtype) + comm.rank)

    for value in run(reduce, world_size=3).values:
        assert value.dtype == dtype
        assert value.tolist() == [3, 6, 9, 12, 15]


def test_views_scalars_and_leaves_are_reduced_in_place():  # row 11
    def reduce(comm):
        matrix = torch.ones(3, 4)
        leaf = torch.ones(2, requires_grad=True)
        scalar = torch.tensor(2.0)
        for tensor in (matrix.t()[1:], leaf, scalar):
            assert ring_all_reduce(comm, tensor) is tensor
        return matrix, leaf.detach(), scalar

    matrix, leaf, scalar = run(reduce, world_size=2).values[1]
    assert matrix.tolist() == [[1, 2, 2, 2]] * 3
    assert leaf.tolist() == [2, 2]
    assert scalar.item() == 4


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_share_reduce_leaves_one_complete_chunk_and_share_only_spreads_them(world_size):
    def halves(comm):
        chunks = split_chunks(values_of(comm.rank, 10), comm.world_size)
        share_reduce(comm, chunks)
        owned = chunks[owned_chunk(comm.rank, comm.world_size)].clone()
        share_only(comm, chunks)
        return owned, torch.cat(chunks)

    expected = sum(values_of(rank, 10) for rank in range(world_size))
    pieces = split_chunks(expected, world_size)
    for rank, (owned, whole) in enumerate(run(halves, world_size=world_size).values):
        torch.testing.assert_close(owned, pieces[owned_chunk(rank, world_size)])
        torch.testing.assert_close(whole, expected)


def test_the_trace_names_the_phases():
    def reduce(comm):
        ring_all_reduce(comm, torch.ones(100))

    trace = run(reduce, world_size=2).trace
    assert set(trace.kinds) <= {"share_reduce", "share_only", "wait"}
    for phase in ("share_reduce", "share_only"):
        assert sum(span.num_bytes for span in trace.of(0, phase)) == 200
