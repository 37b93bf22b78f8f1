"""The mistake behind wrong values stands in the first line, where one mistake makes the same."""

import threading

import pytest
import torch
from ranks import travel_by_value

from labkit.collectives import share_only, share_reduce
from workbook import check
from workbook.exercises.grader import grader, solved
from workbook.exercises.grader.mistakes import with_one_mistake

travel_by_value(__name__)


def passes_its_sum_on(comm, tensor):
    P = comm.world_size
    for _ in range(P - 1):
        incoming = torch.empty_like(tensor)
        comm.exchange(tensor.clone(), (comm.rank + 1) % P, incoming, (comm.rank - 1) % P)
        tensor += incoming


def stops_early(comm, chunks):
    P, r = comm.world_size, comm.rank
    for s in range(P - 2):
        incoming = torch.empty_like(chunks[r - s - 1])
        comm.exchange(chunks[r - s], (r + 1) % P, incoming, r - 1 if r else P - 1)
        chunks[r - s - 1] += incoming


def drops_the_rest(comm, tensor):
    flat = tensor.view(-1)
    n = len(flat) // comm.world_size
    chunks = [flat[i * n : i * n + n] for i in range(comm.world_size)]
    share_reduce(comm, chunks)
    share_only(comm, chunks)


def counts_pulls(events):
    pulled, late = {}, []
    for version, (kind, worker) in enumerate(events):
        if kind == "pull":
            pulled[worker] = version
        else:
            late.append(version - pulled[worker])
    return late


def slopes_from_0(small, large, num_bytes):
    return small[1] + large[1] / large[0] * (num_bytes - small[0])


def goes_up(comm, chunks):
    P, r = comm.world_size, comm.rank
    for s in range(P - 1):
        comm.exchange(chunks[(r + 1 + s) % P], (r + 1) % P, chunks[(r + s) % P], (r - 1) % P)


def takes_turns(comm, parameters, num_updates):
    for n in range(num_updates):
        worker = 1 + n % (comm.world_size - 1)
        parameters -= comm.recv(torch.empty_like(parameters), worker)
        comm.send(parameters, worker)


def cuts_in_a_row(dp, pp, tp):
    ranks = torch.arange(dp * pp * tp)
    return {side: ranks.view(-1, n).tolist() for side, n in (("dp", dp), ("pp", pp), ("tp", tp))}


def in_order_of_distance(comm, blocks):
    P, rank = comm.world_size, comm.rank
    held = blocks.roll(-rank, 0)
    for step in range(1, P):
        incoming = torch.empty_like(held[0])
        comm.exchange(held[step], (rank + step) % P, incoming, (rank - step) % P)
        held[step] = incoming
    return held


def doubles_always(comm, tensor):
    total, distance = tensor.clone(), 1
    while distance < comm.world_size:
        incoming, P = torch.empty_like(total), comm.world_size
        comm.exchange(total, (comm.rank + distance) % P, incoming, (comm.rank - distance) % P)
        total, distance = total + incoming, 2 * distance
    return total


# It cannot travel to where mistakes are tried, and no solution uses it: only ``range``.
rang = threading.Lock().acquire
NAMED = [
    (check.messages.message_time, slopes_from_0, "no differences"),
    (check.ring.share_only, goes_up, "adds step where it should subtract"),
    (check.staleness.server, takes_turns, "waits for one worker"),
    (check.staleness.bookkeeping, counts_pulls, "in both cases"),
    (check.mesh.groups, cuts_in_a_row, "without permute"),
    (check.puzzles.all_to_all, in_order_of_distance, "without flip and roll"),
    (check.ring.rotate_and_add, passes_its_sum_on, "sends tensor"),
    (check.ring.share_reduce, stops_early, "one step fewer"),
    (check.ring.all_reduce, drops_the_rest, "leaves out a remainder"),
    (check.step.flops, lambda n, side, a, b, w: 2 * n * side * a * b * w * w, "square side"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("exercise", "fn", "words"), NAMED)
def test_a_mistake_is_named_in_the_first_line(exercise, fn, words):
    first, *_ = exercise(fn).notes[0].split("\n")
    assert words in first
    assert "expected" not in first


@pytest.mark.slow
def test_nothing_is_named_that_does_not_make_all_values():
    """Two mistakes at a time; and what has no page."""
    two = check.step.flops(lambda n, side, a, b, w: n * side * a * b * w * w + 1)
    assert "same values" not in repr(two)
    double = solved((1,), (2,), (3,))(lambda a: 2 * a)
    assert "same values" not in repr(double(lambda a: a + 3))


@pytest.mark.slow
def test_what_explains_one_world_size_has_to_explain_the_others():
    assert "same values" not in repr(check.puzzles.all_reduce(doubles_always))


def test_unusual_code_is_tried_without_a_warning(recwarn):
    assert [*with_one_mistake("def fn(a):\n    return (a + None)[0]", ("a",))]
    assert not [*recwarn]


def test_a_right_answer_is_not_searched(monkeypatch):
    monkeypatch.setattr(grader, "likely_mistake", None)
    assert check.step.flops(lambda n, side, a, b, w: 2 * n * side**2 * a * b * w**2)
