"""Collectives by name: what the coordinator decides, and what the ranks then carry out."""

import itertools
import math
import random
import threading
import time
from dataclasses import astuple

import pytest
import torch
from cases import FLOATS, OPS, values_of
from ranks import travel_by_value, until_they_wait

from labkit import WorkerError, run
from labkit.costs.traffic import ring_all_reduce_cost
from labkit.horovod import coordinator
from labkit.horovod.coordinator import JOIN, Coordinator, Decision, Request, fuse
from labkit.horovod.negotiator import Engine, NegotiationError
from labkit.runtime.torchrun import open_for

travel_by_value(__name__)
# Relative and absolute.
CLOSE = {torch.float16: (1e-3, 1e-3), torch.bfloat16: (1e-2, 1e-2)}
CLOSE |= {torch.float32: (1e-6, 1e-6), torch.float64: (1e-14, 1e-14)}
SHAPES = [(), (0,), (1,), (5,), (2, 3), (0, 4), (7, 1, 2)]


def wants(name, kind="allreduce", op="sum", shape=(2,), dtype="float32", **more):
    return Request(name, kind, [dtype], [list(shape)], op if "reduce" in kind else "", **more)


def says(*requests, waits=False):
    return {"new": [astuple(request) for request in requests], "waits": waits}


# ---- the coordinator


def test_nothing_is_decided_before_all_ranks_have_it_and_then_in_one_order():
    judge = Coordinator(3)
    a, b = wants("a"), wants("b", op="max")
    assert judge.decide([says(a), says(b), says(a, b)]) == []
    assert [one.requests for one in judge.decide([says(b), says(), says()])] == [[b]]
    assert [one.requests for one in judge.decide([says(), says(a), says()])] == [[a]]


def test_ready_sums_are_fused_up_to_the_limit_and_by_reduction():
    def sizes(decided):
        return [[math.prod(r.shapes[0]) for r in one.requests] for one in decided]

    each = [Decision([wants(str(n), shape=(n,))]) for n in (4, 6, 1, 20, 2)]
    assert sizes(fuse(each, 44)) == [[4, 6, 1], [20], [2]]
    highest, half = {"op": "max"}, {"prescale": 0.5}
    mixed = {"a": {}, "b": highest, "c": half, "d": {}, "e": highest}
    found = fuse([Decision([wants(name, **more)]) for name, more in mixed.items()], 1000)
    assert [[r.name for r in one.requests] for one in found] == [["a", "d"], ["b", "e"], ["c"]]
    apart = [Decision([wants("a")]), Decision([wants("g", "allgather")])]
    apart.append(Decision([wants("x")], "no"))
    assert len(fuse(apart, 1000)) == 3


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        (wants("x"), wants("x", shape=(3,)), "rank 1 has allreduce float32 [3] (sum)"),
        (wants("x"), wants("x", dtype="int8"), "rank 1 has allreduce int8 [2] (sum)"),
        (wants("x"), wants("x", op="max"), "rank 1 has allreduce float32 [2] (max)"),
        (wants("x"), wants("x", prescale=2.0), "times 2 before and 1 after"),
        (wants("x"), wants("x", "allgather"), "rank 1 has allgather float32 [2]"),
        (wants("x", "broadcast", root=0), wants("x", "broadcast", root=1), "from rank 1"),
        (wants("x", "allgather"), wants("x", "allgather", shape=(2, 2)), "[2, 2]"),
    ],
)
def test_ranks_that_differ_get_an_error_with_what_each_has(mine, theirs, told):
    (found,) = Coordinator(2).decide([says(mine), says(theirs)])
    assert "the ranks do not agree on 'x'" in found.error
    assert f"rank 0 has {mine.described()}" in found.error
    assert told in found.error


def test_rows_may_differ_where_they_are_put_together():
    one, two = wants("x", "allgather", shape=(2, 3)), wants("x", "allgather", shape=(5, 3))
    (found,) = Coordinator(2).decide([says(one), says(two)])
    assert (found.error, found.rows) == ("", [[2], [5]])


def test_joined_ranks_are_not_waited_for_until_all_have_joined():
    judge, join = Coordinator(3), Request(JOIN, JOIN)
    assert judge.decide([says(), says(join), says(wants("a"))]) == []
    (found,) = judge.decide([says(wants("a"), join), says(), says()])
    assert (found.requests, found.error) == ([wants("a")], "")
    # Only sums can go on with zeros.
    (refused,) = judge.decide([says(), says(), says(wants("g", "allgather"))])
    assert "rank 0, rank 1 called join()" in refused.error
    (refused,) = judge.decide([says(), says(), says(wants("m", op="min"))])
    assert "called join()" in refused.error
    (last,) = judge.decide([says(), says(), says(join)])
    assert (last.requests, last.last) == ([join], 2)
    # From here on all are needed again.
    assert judge.decide([says(wants("a")), says(), says()]) == []


def test_no_rank_has_a_value():
    none = wants("a", has_value=False)
    for others, has_value in ((none, False), (wants("a"), True)):
        (found,) = Coordinator(2).decide([says(none), says(others)])
        assert (found.error, found.requests[0].has_value) == ("", has_value)


def test_it_is_a_deadlock_once_all_wait_and_nothing_has_come_for_long(monkeypatch):
    judge = Coordinator(2)
    now_s = itertools.count()
    monkeypatch.setattr(coordinator.time, "monotonic", lambda: next(now_s) * 1.0)
    assert judge.decide([says(wants("a"), waits=True), says(wants("b"), waits=True)]) == []
    # Rank 1 still computes: all may come.
    for _ in range(10):
        assert judge.decide([says(waits=True), says()]) == []
    found = []
    while not found:
        found = judge.decide([says(waits=True), says(waits=True)])
    assert next(now_s) > 13
    assert [one.requests[0].name for one in found] == ["a", "b"]
    assert "'a': submitted by rank 0, not by rank 1" in found[0].error
    assert "'b': submitted by rank 1, not by rank 0" in found[0].error


# ---- real ranks


def opened(comm):
    engines = []
    found = open_for("test", comm, lambda: (engines[0].end(), found.close()))
    engines.append(Engine(found.comm))
    return engines[0]


def exact(comm, dtype, op, shape):
    """The reduction of all ranks' values, as PyTorch computes it."""
    size = math.prod(shape)
    every = torch.stack([values_of(rank, size, dtype) for rank in range(comm.world_size)])
    if op in ("sum", "mean"):
        wide = every.double() if dtype in FLOATS else every
        total = wide.any(0) if dtype == torch.bool else wide.sum(0, dtype=wide.dtype)
        found = total / comm.world_size if op == "mean" else total
    else:
        found = {"max": every.amax, "min": every.amin, "product": every.prod}[op](0)
    return found.to(dtype).view(shape)


def any_order(comm):
    """Every rank submits the same names in an order of its own: [what is wrong], none expected."""
    engine, wrong = opened(comm), []
    cases = [
        (dtype, op, shape)
        for dtype, ops in OPS.items()
        if not dtype.is_complex
        for op in ops
        if (op in ("sum", "mean", "max") and dtype != torch.bool) or op == "sum"
        for shape in random.Random(str((dtype, op))).sample(SHAPES, 3)
    ]
    mine, handles = list(enumerate(cases)), {}
    random.Random(comm.rank).shuffle(mine)
    for number, (dtype, op, shape) in mine:
        tensor = values_of(comm.rank, math.prod(shape), dtype).view(shape)
        request = Request.of(str(number), "allreduce", [tensor], op=op)
        handles[number] = engine.submit(request, [tensor])
    for number, held in handles.items():
        (found,), (dtype, op, shape) = held.wait(), cases[number]
        right = exact(comm, dtype, op, shape)
        if found.dtype != dtype or found.shape != right.shape:
            wrong.append((cases[number], found))
        elif not torch.allclose(found.double(), right.double(), *CLOSE.get(dtype, (0, 0))):
            wrong.append((cases[number], found, right))
    return wrong


def priced(comm):
    """The bytes of fused gradients: those of one ring, and what the ranks tell each other."""
    engine, size = opened(comm), 3000
    tensors = [torch.full((size,), float(n)) for n in range(4)]
    handles = []
    before = engine.comm.messages, engine.comm.bytes_sent
    # Held back until all four are there, so that they are fused on all ranks.
    with engine._changed:
        for n, tensor in enumerate(tensors):
            engine_request = Request.of(f"g{n}", "allreduce", [tensor], op="sum")
            handles.append(engine.submit(engine_request, [tensor]))
    found = [held.wait()[0] for held in handles]
    assert all((one == comm.world_size * n).all() for n, one in enumerate(found))
    engine.end()
    ring = ring_all_reduce_cost(4 * size, 4, comm.world_size, comm.rank)
    messages = engine.comm.messages - before[0] - ring.messages
    return messages, engine.comm.bytes_sent - before[1] - ring.num_bytes


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_may_submit_in_any_order(world_size):
    def both(comm):
        return any_order(comm), priced(comm)

    for rank, (wrong, (messages, num_bytes)) in enumerate(run(both, world_size=world_size).values):
        assert wrong == []
        # A length and some JSON to each rank, or to rank 0 alone.
        assert messages == 2 * (world_size - 1 if rank == 0 else min(1, world_size - 1))
        assert 0 <= num_bytes < 600 * world_size


def odd_ends(comm):
    """Names twice, a rank that comes late, refused tensors, other threads, a deadlock."""
    engine, told = opened(comm), []
    mine = torch.ones(3)

    def submit(name, tensor=mine, **more):
        return engine.submit(Request.of(name, "allreduce", [tensor], op="sum"), [tensor], **more)

    if comm.rank == 0:
        first = submit("twice")
        with pytest.raises(
            ValueError, match=r"'twice' is under way already, from .*test_horovod_engine"
        ):
            submit("twice")
        until_they_wait(engine.comm, [0])
        spent_s = time.process_time()
        time.sleep(0.5)
        told.append(time.process_time() - spent_s)
        assert not first.is_done()
        comm.barrier()
    else:
        comm.barrier()
        first = submit("twice")
    assert first.wait()[0].tolist() == [comm.world_size] * 3
    assert submit("twice").wait()[0].tolist() == [comm.world_size] * 3
    with pytest.raises(ValueError, match="expanded"):
        submit("expanded", torch.ones(1).expand(3), in_place=True)
    with pytest.raises(ValueError, match="float8"):
        submit("float8", torch.ones(3).to(torch.float8_e5m2))
    # A thread of the program submits what the main thread waits for.
    came = []
    helper = threading.Thread(target=lambda: came.append(submit("helped").wait()))
    helper.start()
    helper.join(10)
    told.append(len(came))
    coordinator.STUCK_S = 0.3
    with pytest.raises(NegotiationError, match="deadlock: all ranks wait") as error:
        submit(f"only {comm.rank}").wait()
    assert f"'only {comm.rank}': submitted by rank {comm.rank}" in str(error.value)
    # It goes on after that.
    assert submit("after").wait()[0].tolist() == [comm.world_size] * 3
    return told


def test_odd_ends():
    (slept, helped), (other,) = run(odd_ends, world_size=2).values
    # It sleeps while its peer does not come: a loop would take all of the half second.
    assert slept < 0.25
    assert (helped, other) == (1, 1)


def test_a_rank_that_has_returned_is_named_with_what_was_waited_for():
    def leaves(comm):
        engine = opened(comm)
        if comm.rank == 0:
            tensor = torch.ones(2)
            engine.submit(Request.of("never", "allreduce", [tensor], op="sum"), [tensor]).wait()
        time.sleep(0.3)

    with pytest.raises(WorkerError) as error:
        run(leaves, world_size=2)
    text = str(error.value)
    assert "rank 1 takes no part any more" in text
    assert "Unfinished on rank 0: 'never' of" in text
