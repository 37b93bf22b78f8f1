"""The mistake behind wrong values stands in the first line, where one mistake makes the same."""

import pytest
import torch
from ranks import travel_by_value

from labkit.collectives import share_only, share_reduce
from workbook import check
from workbook.exercises.grader import grader, solved

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


NAMED = [
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


def test_a_right_answer_is_not_searched(monkeypatch):
    monkeypatch.setattr(grader, "likely_mistake", None)
    assert check.step.flops(lambda n, side, a, b, w: 2 * n * side**2 * a * b * w**2)
