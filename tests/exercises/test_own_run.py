"""A learner's own run: its counts are those of the call, beside the target and labkit's."""

import contextlib
import re
import time
from functools import partial

import pytest
import torch
from ranks import travel_by_value

import labkit
from labkit import collectives
from workbook import check
from workbook.exercises.grader import Case
from workbook.exercises.grader.held_memory import PeakBytes
from workbook.exercises.grader.own_run import _spend

travel_by_value(__name__)

ELEMENTS = 1_000_000


def all_to_all_ranks(comm, tensor):
    """Every rank sends its whole tensor to every other: right, at P / 2 times the ring's bytes."""
    incoming = torch.empty_like(tensor)
    own = tensor.clone()
    for step in range(1, comm.world_size):
        to, source = (comm.rank + step) % comm.world_size, (comm.rank - step) % comm.world_size
        tensor += comm.exchange(own, to, incoming, source)


def never_received(comm, tensor):
    comm.recv(tensor, (comm.rank + 1) % comm.world_size)


def stub(comm, tensor):
    raise NotImplementedError


def as_good_as_it_gets(comm, tensor):
    collectives.ring_all_reduce(comm, tensor)


# No target: only the values are judged, so any traffic passes.
SUM = check.Exercise(
    "sum",
    expected=lambda rank, case: case.total(),
    library=collectives.ring_all_reduce,
    drawn_size=ELEMENTS,
    sizes=(8,),
)


def run_of(fn, exercise=SUM, world_size=4):
    return check.grade(fn, exercise, world_sizes=(2,)).own_run(world_size)


@pytest.fixture(scope="module")
def wasteful():
    return run_of(all_to_all_ranks)


def test_a_wasteful_run_passes_at_twice_the_bytes(wasteful):
    assert wasteful.sentence == "passed."
    assert wasteful.columns == ["yours", "labkit"]
    assert wasteful.rows["messages"] == ["3", "6"]


def test_memory_held_is_counted_while_the_function_runs(wasteful):
    # incoming and own, of 4 MB each; the ring's share-reduce has two chunks at a time.
    assert wasteful.rows["memory held"] == ["7.63 MiB", "1.91 MiB"]


def test_both_timelines_are_drawn_from_their_first_call_to_their_last(wasteful):
    for figure in (wasteful.figure, wasteful.library_figure):
        assert "Timeline of 4 ranks" in figure.alt
    page = wasteful._repr_html_()
    assert page.count("<img alt=") == 2
    assert ">memory held</th>" in page


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


def test_the_librarys_function_meets_its_target():
    found = check.ring.all_reduce(partial(collectives.ring_all_reduce), world_sizes=(2,)).own_run(
        3
    )
    assert found.rows["bytes"][0] == found.rows["bytes"][1] == found.rows["bytes"][2]


@pytest.mark.parametrize("fn", [stub, None, never_received])
def test_what_cannot_run_is_told_in_one_sentence(fn):
    assert "nothing to draw" in repr(run_of(fn))


def all_reduces_beside_backward(loss, parameters, buckets, start, batch_size):
    flats, handles = [], []

    def launch(bucket):
        flats.append(torch.cat([parameters[i].grad.flatten() for i in bucket]))
        handles.append(start(flats[-1]))

    # The first registered parameter of a bucket gets its gradient last: each layer has a weight
    # and a bias, and the weights of this run fill their buckets alone.
    with contextlib.ExitStack() as hooks:
        for bucket in buckets[:-1]:
            hook = partial(lambda bucket, _: launch(bucket), bucket)
            handle = parameters[min(bucket)].register_post_accumulate_grad_hook(hook)
            hooks.callback(handle.remove)
        loss.backward()
    launch(buckets[-1])
    for bucket, flat, handle in zip(buckets, flats, handles):
        handle.wait()
        pieces = (flat / batch_size).split([parameters[i].numel() for i in bucket])
        for i, piece in zip(bucket, pieces):
            parameters[i].grad = piece.view_as(parameters[i])


def test_a_backward_with_overlap_is_drawn_while_its_all_reduces_run():
    found = check.overlap.backward(all_reduces_beside_backward, world_sizes=(2,)).own_run(2)
    # Seven all-reduces of two messages each.
    assert found.rows["messages"] == ["14"]
    assert found.figure is not None


def test_a_check_without_ranks_has_no_run_to_draw():
    verdict = check.answers(abs, {(-1,): 1})
    with pytest.raises(ValueError, match="graded without ranks"):
        verdict.own_run()


def test_peak_bytes_counts_storages_once_and_only_while_they_live():
    given = torch.zeros(1000)
    peak = PeakBytes()
    with peak:
        first = given.clone()
        view = first.view(10, 100)
        given += 1
        del first, view
        given.clone()
        [given.clone() for _ in range(3)]
    assert peak.num_bytes == 3 * given.nbytes


def serve_one(comm, parameters, num_updates):
    comm.recv(parameters, 1)
    parameters.neg_()
    comm.send(parameters, 1)


def test_a_rank_that_runs_the_checks_own_code_is_drawn_from_the_drawn_call_on():
    _, exercise = check.staleness.server(serve_one, world_sizes=(2,)).run_again.args
    ran = labkit.run(_spend, [serve_one], exercise.to_run(), Case(2, 1), world_size=2)
    drawn_s = min(start_s for ((_, start_s, _),) in ran.values)
    computed = ran.trace.of(1, "compute")
    assert len(computed) == 2  # the call that is counted, and the call that is drawn
    assert [span.end_s > drawn_s for span in computed] == [False, True]
