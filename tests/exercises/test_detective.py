"""What page 13 shows of a run on two hosts that stood still."""

import pytest

from workbook.exercises import detective
from workbook.exercises.detective import HungRun, entries_in, errors_in, explanation_in
from workbook.exercises.programs import early_stop

STACK = """Thread 0x00007e (most recent call first):
  File "/env/torch/distributed/distributed_c10d.py", line 6614 in barrier
  File "/env/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/tmp/x/early_stop.py", line 33 in train
"""


def test_one_rank_stops_early_and_never_at_the_beginning_or_the_end():
    source = detective._PROGRAM.read_text().splitlines()
    for seed in range(20):
        rank, host, line = HungRun({}, {}, seed).expected
        losses = early_stop.losses_of(seed, 4)
        ((step, lowest),) = (losses < 0.1).nonzero().tolist()
        assert 3 <= step < early_stop.STEPS - 3
        assert (rank, host) == (lowest, lowest // 2)
        assert source[line - 1].strip() == "dist.barrier()"


def test_stacks_are_shown_without_what_is_inside_of_pytorch(capsys):
    HungRun({0: STACK, 1: "ConnectionError: no answer\n"}, {}, 1).show_stacks()
    assert capsys.readouterr().out.splitlines() == [
        "rank 0",
        '  File "distributed_c10d.py", line 6614 in barrier',
        '  File "early_stop.py", line 33 in train',
        "rank 1",
        "ConnectionError: no answer",
    ]
    assert entries_in("ConnectionError: no answer") == []


def test_errors_and_what_torchrun_takes_for_the_cause():
    said = "rank 3: [rank3]: RuntimeError: [/src/gloo/pair.cc:78] Timed out waiting"
    summary = ["  rank      : 3", "Root Cause (first observed failure):", "  rank      : 2"]
    lines = [(1, said), *((1, line) for line in summary), (1, "  rank      : 0"), (0, "rank 0:")]
    due = ["rank 3: [rank3]: RuntimeError: Timed out waiting", *summary[1:]]
    assert errors_in(lines) == [(1, line) for line in due]


@pytest.mark.parametrize("begin", ["rank 2: labkit: rank 0 and", "labkit.errors.WorkerError: a"])
def test_an_explanation_reaches_from_its_first_sentence_to_the_next_step(begin):
    lines = ["rank 1: some", begin, "rank 2:   rank 0: 1. barrier", "rank 2: Next step: this."]
    assert explanation_in([*lines, "more"]) == lines[1:]
