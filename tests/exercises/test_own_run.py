"""A learner's own run is drawn beside labkit's."""

import re
import time

import pytest
import torch
from answers.ring import through_rank_0

from workbook import check
from workbook.exercises.grader import solved
from workbook.exercises.grader.held_memory import PeakBytes


def never_received(comm, tensor):
    comm.recv(tensor, (comm.rank + 1) % comm.world_size)


def stub(comm, tensor):
    raise NotImplementedError


def run_of(fn, exercise=check.ring.naive_all_reduce, world_size=4):
    return check.grade(fn, exercise, world_sizes=(2,)).own_run(world_size)


def test_a_run_is_drawn_beside_labkits():
    run = run_of(through_rank_0)
    assert run.sentence == "passed."
    assert "Timeline of 4 ranks" in run.figure.alt
    assert "Timeline of 4 ranks" in run.library_figure.alt
    assert run._repr_html_().count("<img alt=") == 2


def slowly_made(rank, case):
    time.sleep(1.5 if case.size == 9 and rank else 0.0)
    return (case.tensor(rank),)


def rank_0_answers(fn, comm, tensor):
    if comm.rank:
        fn(comm, tensor)
    else:
        comm.recv(tensor, 1)


def test_a_part_that_the_check_plays_does_not_widen_the_timeline():
    options = {"inputs": slowly_made, "call": rank_0_answers, "sizes": (8,), "drawn_size": 9}
    found = run_of(lambda comm, tensor: comm.send(tensor, 0), check.Exercise("to 0", **options), 2)
    milliseconds = re.search(r"Timeline of 2 ranks over ([\d.]+) (ms|µs|us)", found.figure.alt)
    assert milliseconds, found.figure.alt
    assert milliseconds[2] != "ms" or float(milliseconds[1]) < 1400


@pytest.mark.parametrize("fn", [stub, None, never_received])
def test_what_cannot_run_is_told_in_one_sentence(fn):
    assert "nothing to draw" in repr(run_of(fn))


def test_a_check_without_ranks_has_no_run_to_draw():
    with pytest.raises(ValueError, match="graded without ranks"):
        solved((-1,), mistakes={})(abs)(abs).own_run()


def test_peak_bytes_counts_storages_once_and_only_while_they_live():
    given = torch.zeros(1000)
    with PeakBytes() as peak:
        first = given.clone()
        view = first.view(10, 100)
        given += 1
        del first, view
        given.clone()
        [given.clone() for _ in range(3)]
    assert peak.num_bytes == 3 * given.nbytes
