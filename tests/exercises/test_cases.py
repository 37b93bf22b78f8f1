"""Broken jobs: the evidence of each run leads to the answer, and refutes every other one."""

import inspect

import pytest
from answers.cases import by_counting

from workbook import check
from workbook.exercises import broken_jobs
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET, PASSED


@pytest.fixture(scope="module", params=["mismatch", "drift", "divisor"])
def case(request):
    """A case of each kind, drawn anew, as a learner gets it."""
    made = getattr(broken_jobs, request.param)()
    return request.param, made, lambda **said: getattr(check.cases, request.param)(made, **said)


def test_the_answer_passes_and_says_what_happened(case):
    _, made, judge = case
    found = judge(**made.answer)
    assert found.status == PASSED
    assert found.notes == [made.against["solved"]]


def test_nothing_named_is_no_attempt_and_a_part_of_the_answer_no_solution(case):
    _, made, judge = case
    assert judge(**dict.fromkeys(made.answer)).status == NOT_ATTEMPTED
    found = judge(cause=made.answer["cause"])
    assert found.status == NOT_YET
    assert "right so far: cause." in found.notes[0]
    assert "name " in judge(colour="red").notes[0]


def test_each_of_five_other_causes_is_refused_with_what_the_run_says_against_it(case):
    _, made, judge = case
    others = made.suspects.keys() - {made.answer["cause"]}
    assert len(others) == 5
    reasons = {judge(**made.answer | {"cause": letter}).notes[0] for letter in others}
    assert len(reasons) == 5
    # Each is about this run: it has a number from it.
    assert all(any(map(str.isdigit, reason.partition(": ")[2])) for reason in reasons), reasons


def test_each_other_wrong_answer_is_refused_with_a_reason(case):
    _, made, judge = case
    for name, right in made.answer.items():
        if name != "cause":
            for wrong in (right + 1, right - 1):
                found = judge(**made.answer | {name: wrong})
                assert found.status == NOT_YET
                assert found.notes[0].startswith(f"{name} ")
                assert len(found.notes[0].split()) > 4


def test_the_line_is_one_of_the_program_that_the_page_shows(case):
    _, made, _ = case
    lines, first = inspect.getsourcelines(made.program)
    assert made.answer["line"] - first in range(1, len(lines))


def differ_in(by_rank, key):
    """The rank that alone has another ``key(what it has)`` than the others."""
    keys = {rank: str(key(mine)) for rank, mine in by_rank.items()}
    (odd,) = (rank for rank in keys if list(keys.values()).count(keys[rank]) == 1)
    return odd


def of_mismatch(clues):
    odd = differ_in(clues["dumps"], lambda dump: dump[-1]["profiling_name"])
    return {"rank": odd, "number": len(clues["dumps"][odd])}


def of_drift(clues):
    step, (rank,) = by_counting(clues["checksums"])
    return {"step": step, "rank": rank}


def of_divisor(clues):
    return {"factor": clues["lengths"]["used"] / clues["lengths"]["one device"]}


FROM_CLUES = {"mismatch": of_mismatch, "drift": of_drift, "divisor": of_divisor}


def test_the_clues_that_the_page_shows_lead_to_the_answer(case):
    name, made, judge = case
    found = FROM_CLUES[name](made.clues)
    assert judge(**found).notes[0].startswith("right so far: "), (found, made.answer)


@pytest.mark.more
@pytest.mark.parametrize("name", FROM_CLUES)
def test_cases_are_drawn_anew_and_their_clues_lead_to_the_answer(name):
    made = [getattr(broken_jobs, name)(seed) for seed in range(8)]
    assert len({str(one.answer) for one in made}) > 4
    for one in made:
        assert not any(one.objection(*found) for found in FROM_CLUES[name](one.clues).items())
