"""What page 15 shows of a run on two hosts that stood still."""

from functools import partial
from operator import itemgetter

import numpy
import pytest
from answers.detective import ERRORS, by_number, compares_states, hung

from workbook import check
from workbook.exercises import detective
from workbook.exercises.detective import entries_in, errors_in
from workbook.exercises.programs import early_stop

STACK = """Thread 0x00007e (most recent call first):
  File "/env/torch/distributed/distributed_c10d.py", line 6614 in barrier
  File "/env/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/tmp/x/early_stop.py", line 33 in train
"""


def test_one_rank_stops_early_and_never_at_the_beginning_or_the_end():
    source = detective._PROGRAM.read_text().splitlines()
    for seed in range(20):
        answer = hung(seed).answer
        losses = early_stop.losses_of(seed, 4)
        ((step, lowest),) = (losses < 0.1).nonzero().tolist()
        assert 3 <= step < early_stop.STEPS - 3
        assert (answer["rank"], answer["host"]) == (lowest, lowest // 2)
        assert source[answer["line"] - 1].strip() == "dist.barrier()"


def test_five_other_causes_are_refused_with_what_the_run_says_against_them():
    case = hung(3)
    others = case.suspects.keys() - {case.answer["cause"]}
    said = [check.detective.named(case, cause=letter).notes[0] for letter in others]
    assert len(set(said)) == 5
    assert all(any(map(str.isdigit, one.partition(": ")[2])) for one in said), said
    assert any("it names 2, rank 2 and rank 1" in one for one in said), said
    assert check.detective.named(case, **case.answer)


def test_stacks_are_shown_without_what_is_inside_of_pytorch(capsys):
    detective.show_stacks(hung(1, {0: STACK, 1: "ConnectionError: no answer\n"}))
    assert capsys.readouterr().out.splitlines() == [
        "rank 0",
        '  File "distributed_c10d.py", line 6614 in barrier',
        '  File "early_stop.py", line 33 in train',
        "rank 1",
        "ConnectionError: no answer",
    ]
    assert entries_in("ConnectionError: no answer") == []


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        (partial(by_number, compared=itemgetter("profiling_name")), "sizes may differ"),
        (partial(by_number, compared=lambda entry: str(entry["input_sizes"])), "names may differ"),
        (lambda dumps: by_number(dumps) and numpy.subtract(by_number(dumps), (0, 1)), "same call"),
        (compares_states, "retired or not"),
        (lambda dumps: by_number(dumps) and by_number(dumps)[::-1], "first the rank"),
    ],
)
def test_what_was_overlooked_in_the_recorder_is_named(mistake, words):
    assert words in " ".join(repr(check.detective.culprit(mistake)).lower().split())


def test_errors_and_what_torchrun_takes_for_the_cause():
    lines = [*ERRORS, (1, "  rank      : 3"), (1, "  rank      : 0"), (0, "rank 0:")]
    said = "rank 3: [rank3]: RuntimeError: [/src/gloo/pair.cc:78] Timed out waiting"
    assert errors_in([(1, said), *lines]) == [
        *(error for error in ERRORS if error[0] == 0),
        (1, "rank 3: [rank3]: RuntimeError: Timed out waiting"),
        *(error for error in ERRORS if error[0] == 1),
    ]
