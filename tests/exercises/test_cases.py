"""Broken jobs: the evidence of each run leads to the answer, and refutes every other one."""

import inspect
import itertools
from collections import Counter

import pytest
import torch

from workbook import check
from workbook.exercises import broken_jobs, silent_jobs
from workbook.exercises.grader.report import NOT_ATTEMPTED, NOT_YET, PASSED


def odd_one_out(by_rank):
    """The rank that alone has what no other has."""
    texts = {rank: str(mine) for rank, mine in by_rank.items()}
    (rank,) = (one for one in texts if list(texts.values()).count(texts[one]) == 1)
    return rank


def of_mismatch(clues):
    rank = odd_one_out({r: dump[-1]["profiling_name"] for r, dump in clues["dumps"].items()})
    return {"rank": rank, "number": len(clues["dumps"][rank])}


def of_drift(clues):
    for step, now in enumerate(zip(*clues["checksums"].values())):
        if len({str(mine) for mine in now}) > 1:
            return {"step": step, "rank": odd_one_out(dict(enumerate(now)))}
    raise AssertionError("all checksums are equal")


def of_straggler(clues):
    """Who works for longest, by the spans of the run."""
    seconds = {rank: clues["run"].trace.seconds_by_kind(rank) for rank in clues["lengths"]}
    return {
        "rank": max(seconds, key=lambda rank: seconds[rank]["data"] + seconds[rank]["compute"])
    }


def of_divisor(clues):
    return {"factor": clues["lengths"]["used"] / clues["lengths"]["one device"]}


def of_sampler(clues):
    (rank,) = (rank for rank, epochs in clues["read"].items() if epochs[0] != epochs[-1])
    last = {n for epochs in clues["read"].values() for n in epochs[-1]}
    return {"rank": rank, "missed": len({*range(clues["size"])} - last)}


def of_buffers(clues):
    sums = clues["checksums"]
    differ = [name for name in sums[0] if len({sums[rank][name] for rank in sums}) > 1]
    return {"rank": min(clues["accuracy"], key=clues["accuracy"].get), "buffer": differ[0]}


def of_link(clues):
    """The pair with the slowest messages of 400 kB, in both directions."""
    both = {
        (a, b): min(clues["ms"][a, b, 400_000], clues["ms"][b, a, 400_000])
        for a, b in itertools.combinations(range(4), 2)
    }
    return {"between": list(max(both, key=both.get))}


def of_tokens(clues):
    """Who has the odd micro-batches, and what a token in the smallest counts."""
    counts = {r: [sum(lengths) for lengths in own] for r, own in clues["lengths"].items()}
    usual = Counter(itertools.chain(*counts.values())).most_common(1)[0][0]
    (rank,) = (r for r, own in counts.items() if set(own) != {usual})
    return {"rank": rank, "times": max(*counts[rank], usual) / min(counts[rank])}


def of_blocks(clues):
    """The first wrong gradient, and whether it is as wrong on all ranks, by the same factor."""
    wrong = [name for name, by_rank in clues["lengths"].items() if abs(by_rank[0] - 1) > 1e-9]
    ratios = clues["lengths"][wrong[0]]
    if all(abs(ratio - len(ratios)) < 1e-9 for ratio in ratios):
        # Its own second weight is the first that is wrong.
        return {"block": int(wrong[0].split()[1][0])}
    # What is below it is wrong, and nothing of its own.
    below = -1 if wrong[0].startswith("embed") else int(wrong[0].split()[1][0])
    return {"block": below + 1}


def of_muon(clues):
    (found, right) = (clues["changes"][who] for who in ("3 ranks", "one device"))
    return {"matrices": [n for n in found if not torch.allclose(found[n], right[n], rtol=1e-9)]}


def of_last_bits(clues):
    (tensor,) = (n for n, number in clues["versions"]["weights in the end"].items() if number > 1)
    return {"tensor": tensor}


FROM_CLUES = {
    "mismatch": of_mismatch,
    "drift": of_drift,
    "straggler": of_straggler,
    "divisor": of_divisor,
    "sampler": of_sampler,
    "buffers": of_buffers,
    "link": of_link,
    "tokens": of_tokens,
    "blocks": of_blocks,
    "muon": of_muon,
    "last_bits": of_last_bits,
}


def draw(name, seed=None):
    module = silent_jobs if hasattr(silent_jobs, name) else broken_jobs
    return getattr(module, name)(seed)


@pytest.fixture(scope="module", params=FROM_CLUES)
def case(request):
    """Its name, a run that is drawn anew, as a learner gets it, and the check of an answer."""
    made = draw(request.param)
    return request.param, made, lambda **said: getattr(check.cases, request.param)(made, **said)


def test_the_answer_passes_and_says_what_happened(case):
    _, made, judge = case
    found = judge(**made.answer)
    assert found.status == PASSED
    assert found.notes[0] == made.against["solved"]
    # The two ranks of a link may be named in any order.
    turned = {n: one[::-1] if isinstance(one, list) else one for n, one in made.answer.items()}
    assert judge(**turned).passed


def test_nothing_named_is_no_attempt_and_a_part_of_the_answer_no_solution(case):
    _, made, judge = case
    assert judge(**dict.fromkeys(made.answer)).status == NOT_ATTEMPTED
    found = judge(cause=made.answer["cause"])
    assert found.status == NOT_YET
    assert "right so far: cause." in found.notes[0]
    assert "name " in judge(color="red").notes[0]


def test_each_of_five_other_causes_is_refused_with_what_the_run_says_against_it(case):
    _, made, judge = case
    others = made.suspects.keys() - {made.answer["cause"]}
    assert len(others) == 5
    reasons = {judge(**made.answer | {"cause": letter}).notes[0] for letter in others}
    assert len(reasons) == 5
    # Each is about this run: it has a number from it.
    assert all(any(map(str.isdigit, reason.partition(": ")[2])) for reason in reasons), reasons
    assert "suspects are a, b" in judge(cause="z").notes[0]
    assert "right so far: cause." in judge(cause=made.answer["cause"].upper()).notes[0]


def wrong_ones(name, right):
    if isinstance(right, str):
        return ["running_mean", 3]
    if isinstance(right, list):
        return [[*right, right[0]], right[1:], 3]
    return [right + 1, right - 1, right + 2, "2"]


def test_each_other_wrong_answer_is_refused_with_a_reason(case):
    _, made, judge = case
    for name, right in made.answer.items():
        for wrong in wrong_ones(name, right) if name != "cause" else ():
            found = judge(**made.answer | {name: wrong})
            assert found.status == NOT_YET
            assert found.notes[0].startswith(f"{name} ")
            if name in made.choices and wrong not in made.choices[name]:
                # A name without its number, for one, is told the names that there are.
                assert "choose from" in found.notes[0] or isinstance(wrong, list)


def test_the_line_is_one_of_the_program_that_the_page_shows(case):
    _, made, _ = case
    lines, first = inspect.getsourcelines(made.program)
    assert made.answer.get("line", first + 1) - first in range(1, len(lines))


def test_the_clues_that_the_page_shows_lead_to_the_answer(case):
    name, made, judge = case
    found = FROM_CLUES[name](made.clues)
    assert judge(**found).notes[0].startswith("right so far: "), (found, made.answer)


@pytest.mark.more
@pytest.mark.parametrize("name", FROM_CLUES)
def test_cases_are_drawn_anew_and_their_clues_lead_to_the_answer(name):
    made = [draw(name, seed) for seed in range(8)]
    assert len({str(one.answer) for one in made}) > 4
    for one in made:
        found = FROM_CLUES[name](one.clues)
        assert [one.objection(*pair) for pair in found.items()] == [""] * len(found)
