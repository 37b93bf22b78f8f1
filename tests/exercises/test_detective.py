"""What page 12 shows of a run on two hosts that stood still."""

import random

import pytest

from workbook.exercises import detective_run
from workbook.exercises.detective_dumps import WORLD_SIZE, faults
from workbook.exercises.detective_run import HungRun, errors_in, explanation_in
from workbook.exercises.programs import early_stop

STACK = """Current thread 0x00007f (most recent call first):
  <no Python frame>

Thread 0x00007e (most recent call first):
  File "/env/torch/distributed/distributed_c10d.py", line 6614 in barrier
  File "/env/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/tmp/x/early_stop.py", line 33 in train
  File "/tmp/x/early_stop.py", line 43 in main
"""


def test_one_rank_stops_early_and_never_at_the_beginning_or_the_end():
    runs = [HungRun({}, {}, seed) for seed in range(40)]
    assert {run.culprit for run in runs} == {0, 1, 2, 3}
    for run in runs:
        losses = early_stop.losses_of(run.seed, run.world_size)
        ((step, rank),) = (losses < 0.1).nonzero().tolist()
        assert 3 <= step < early_stop.STEPS - 3
        assert (run.culprit, run.host) == (rank, rank // 2)


def test_the_lines_are_those_of_the_program():
    run, source = HungRun({}, {}, 1), detective_run._PROGRAM.read_text().splitlines()
    assert source[run.line - 1].strip() == "dist.barrier()"
    assert source[run.others_line - 1].strip() == "dist.all_reduce(gradient)"
    assert "break" in source[run.cause_line - 1]


def test_stacks_are_shown_without_threads_that_do_nothing(capsys):
    HungRun({0: STACK, 1: "ConnectionError: no answer\n"}, {}, 1).show_stacks()
    assert capsys.readouterr().out.splitlines() == [
        "rank 0",
        '  File "distributed_c10d.py", line 6614 in barrier',
        '  File "early_stop.py", line 33 in train',
        '  File "early_stop.py", line 43 in main',
        "rank 1",
        "ConnectionError: no answer",
    ]


def test_errors_and_what_torchrun_takes_for_the_cause():
    summary = [
        "Failures:",
        "  rank      : 3 (local_rank: 1)",
        "Root Cause (first observed failure):",
    ]
    summary += ["[0]:", "  rank      : 2 (local_rank: 0)", "  exitcode  : 1"]
    said = "rank 3: [rank3]: RuntimeError: [/src/gloo/pair.cc:78] Timed out waiting"
    lines = [(1, said), *((1, line) for line in summary), (0, "rank 0: something")]
    assert errors_in(lines) == [
        (1, "rank 3: [rank3]: RuntimeError: Timed out waiting"),
        (1, "Root Cause (first observed failure):"),
        (1, "  rank      : 2 (local_rank: 0)"),
    ]


@pytest.mark.parametrize("begin", ["rank 2: labkit: rank 0 and", "labkit.errors.WorkerError: a"])
def test_an_explanation_reaches_from_its_first_sentence_to_the_next_step(begin):
    before = ["rank 1: something", "rank 1: labkit: rank 1 ends with this DeadlockError"]
    lines = [*before, begin, "rank 2:   rank 0: 1. barrier", "rank 2: Next step: this.", "more"]
    assert explanation_in(lines) == lines[2:5]
    assert explanation_in(before) == []


def test_a_rank_that_did_not_answer_has_no_entries():
    assert detective_run._entries_in("ConnectionError: no answer") == []
    assert detective_run._entries_in("{}") == []


def test_every_rank_is_a_culprit_and_every_fault_occurs():
    for seed in range(20):
        cases = faults(random.Random(seed))
        guilty = {case.culprit for case in cases if case.due}
        assert guilty == set(range(WORLD_SIZE))
        assert {case.kind for case in cases} == {"behind", "alone", "other", "size", "none"}
        assert all(case.lost != case.culprit for case in cases)
