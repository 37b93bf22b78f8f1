"""What all checks share: verdicts, their words, and a page's own exercises."""

import itertools
import subprocess
import sys
import textwrap
import time
from functools import partial

import pytest
import torch
from answers import naive, placement as answers_to_placement, tree
from answers.fairness import in_turns
from answers.pipeline import in_words
from answers.ring import neighbours
from graded import in_shared_runs
from ranks import travel_by_value
from workbook.exercises.grader.words import WORDS, Mistake, named
from workbook.exercises.grader.wrong_tensor import contents, name_mistake

from labkit import collectives
from labkit.collectives.ring import split_chunks
from labkit.schedules.pipeline import gpipe
from workbook import check
from workbook.exercises import fairness, placement
from workbook.exercises.grader import grader, on_ranks
from workbook.exercises.grader.exercise import Case

travel_by_value(__name__)


# A page's own exercise


def tell_right(comm, number):
    right, left = neighbours(comm)
    return comm.exchange(torch.tensor([number]), right, torch.empty(1), left).item()


def tell_left(comm, number):
    right, left = neighbours(comm)
    return comm.exchange(torch.tensor([number]), left, torch.empty(1), right).item()


def keep(comm, number):
    return number


TOLD = check.Exercise(
    "tell your neighbour",
    signature="comm, number",
    inputs=lambda rank, case: (10.0 * rank,),
    expected=lambda rank, case: 10.0 * ((rank - 1) % case.world_size),
    written=None,
    target=lambda rank, case: check.Target(1, 4, 1, frozenset({(rank + 1) % case.world_size})),
    mistakes={"it is the rank's own number": lambda rank, case: 10.0 * rank},
    sizes=(),
)
ON_TREES = (
    tree.tries_each_distance,
    tree.adds_itself,
    tree.leaves_ten_alone,
    tree.stops_after_one_round,
)


@pytest.fixture(scope="module")
def verdicts():
    found = {fn: partial(check.grade, fn, TOLD, (3,)) for fn in (tell_left, keep)}
    for fn in ON_TREES:
        found[fn] = partial(check.tree.all_reduce, fn, world_sizes=(4,))
    for size in (2, 8):
        found[size] = partial(check.tree.all_reduce, tree.tries_each_distance, world_sizes=(size,))
    return in_shared_runs(found)


def test_a_page_can_grade_an_exercise_of_its_own(verdicts):
    right = check.grade(tell_right, TOLD)
    assert right.passed
    assert "messages   1         1         1" in repr(right)
    left, kept = verdicts[tell_left], verdicts[keep]
    assert {"value.differs", "peers.left"} <= {*left.ids}
    assert "rank 0 is the first with a wrong result: it is 10.0, expected 20.0" in repr(left)
    assert "traffic.nothing" in kept.ids
    assert "rank 0 is the first with a wrong result: it is the rank's own number" in repr(kept)


def test_a_function_without_ranks_is_graded_by_its_answers(capsys):
    def add(a, b):
        return a + b

    sums = {(1, 2): 3, (2, 2): 4}
    assert check.answers(add, sums).passed
    wrong = check.answers(max, sums, mistakes={"it is the larger one": max})
    assert wrong.ids == ["answer.wrong"]
    assert check.answers(lambda a, b: a[b], sums).ids == ["answer.raised"]
    said = capsys.readouterr().out
    assert "passed: add\nall 2 answers are right" in said
    assert "max(1, 2) should return 3, but it returned 2: it is the larger one" in said
    assert "TypeError" in said


def test_a_mistake_is_named_only_where_all_answers_agree_with_it():
    verdict = check.answers(
        lambda a: 2 * a, {(2,): 5, (3,): 7}, mistakes={"square": lambda a: a**2}
    )
    assert "square" not in repr(verdict)


def test_an_answer_before_a_crash_is_judged_first():
    verdict = check.answers(lambda a: 1 // a, {(1,): 2, (0,): 0})
    assert verdict.ids == ["answer.wrong"]


def test_an_answer_may_be_a_tensor():
    assert "tensor([1., 1.])" in repr(check.answers(torch.ones, {(2,): 3}))
    assert check.answers(torch.ones, {(2,): torch.ones(2)}).passed
    assert not check.answers(torch.ones, {(2,): torch.zeros(2)}).passed


# Verdicts


def test_what_is_printed_is_what_is_returned(capsys):
    verdict = check.ring.all_reduce(collectives.ring_all_reduce)
    said = capsys.readouterr().out
    assert said.startswith("works, but not yours yet: ")
    assert said == f"{verdict!r}\n"
    assert verdict.columns == ["2 ranks", "3 ranks", "4 ranks"]


def test_a_function_of_the_library_helps_in_one_exercise_and_solves_another():
    solved = check.placement.step_seconds(answers_to_placement.step_by_the_planner)
    assert solved.works
    assert solved.ids == ["library.called"]
    assert check.placement.best_cuts(answers_to_placement.best_by_predict_split).passed


def test_a_tree_that_goes_wrong_on_eight_ranks_alone_is_found(verdicts):
    assert check.tree.all_reduce.__kwdefaults__["world_sizes"] == (2, 8)
    assert verdicts[2].passed
    assert verdicts[tree.tries_each_distance].passed
    assert "with 8 ranks and 96 elements: 4, where the target is 3" in repr(verdicts[8])


def test_what_is_not_looked_at_is_not_called_right(verdicts):
    rows = verdicts[tree.adds_itself].rows
    assert (rows["shape"], rows["value"], rows["same bits"]) == (["right"], ["wrong"], ["-"])


def test_a_cell_of_another_size_says_so(verdicts):
    rows = verdicts[tree.leaves_ten_alone].rows
    assert rows["value"] == ["wrong (at 10)"]
    assert rows["messages"] == ["0, not 2 (at 10)"]


def test_the_checks_give_the_same_text_twice(verdicts):
    again = check.tree.all_reduce(tree.stops_after_one_round, world_sizes=(4,))
    assert repr(again) == repr(verdicts[tree.stops_after_one_round])
    assert repr(again).endswith(
        "value: with 4 ranks and 96 elements, rank 0 is the first with a wrong result: partial "
        "sum: it holds rank 0 + rank 1, and lacks ranks 2 and 3\n\n"
        "messages: with 4 ranks and 96 elements: 1, where the target is 2: one step too few"
    )


def flips_bits_of_floats(comm, tensor):
    return tensor ^ 1


def a_wordy_stub(comm, tensor):
    raise NotImplementedError(
        "exercise 2: all ranks send to rank 0, which adds, and sends the sum back to each of them"
    )


class NotBegun(torch.distributed.Work):
    def __init__(self, operation, tensors):
        super().__init__()
        self.tensors = tensors

    def wait(self, timeout=None):
        raise NotImplementedError

    get_future = wait


class Begun(NotBegun):
    def __init__(self, operation, tensors):
        super().__init__(operation, tensors)
        try:
            operation()
        except Exception as error:
            self.error = error

    def wait(self, timeout=None):
        raise NotImplementedError


def test_a_class_is_not_attempted_until_one_of_its_methods_is_written():
    assert check.backend.work(NotBegun).status == "not attempted yet"
    assert "stub.calls_stub" in check.backend.work(Begun).ids


def test_an_error_of_pytorch_is_not_taken_for_a_stub(capsys):
    assert check.naive.all_reduce(flips_bits_of_floats).status == "not yet"
    assert "not implemented for 'Float'" in capsys.readouterr().out
    assert check.naive.all_reduce(a_wordy_stub).status == "not attempted yet"
    assert check.answers(lambda a: torch.ones(a) ^ 1, {(2,): 3}).status == "not yet"


def test_an_error_is_told_with_its_case_and_line_and_without_a_traceback():
    said = repr(check.naive.all_reduce(naive.stops_at_rank_1))
    assert "with 2 ranks and 10 elements: rank 1 raised IndexError" in said
    assert "return tensor[comm.rank + 9 * (comm.rank == 1)]" in said
    assert "Traceback" not in said


def never_ends(comm, tensor):
    while True:
        time.sleep(0.01)


@pytest.mark.slow
def test_a_loop_without_an_end_meets_the_deadline(monkeypatch):
    monkeypatch.setattr(on_ranks, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(on_ranks, "AGAIN_S", 0.5)
    said = repr(check.naive.all_reduce(never_ends))
    assert "with 2 ranks and 96 elements: the run was still going" in said
    assert "time.sleep(0.01)" in said


def test_a_verdict_is_a_table_in_html_too():
    verdict = check.Verdict("a < b", "passed", ["2 ranks"], {"value": ["right"]}, ["1 < 2"])
    assert verdict
    page = verdict._repr_html_()
    assert '>value</th><td style="white-space: nowrap">right</td>' in page
    assert "a &lt; b" in page
    assert "1 &lt; 2" in page
    assert repr(verdict).splitlines()[2:4] == ["        2 ranks", "value   right"]


def test_the_check_is_shown_once_in_a_notebook(monkeypatch):
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda data, raw: shown.append(data))
    verdict = check.Verdict("ring", "passed", shown=True)
    verdict._ipython_display_()
    assert not shown
    verdict._ipython_display_()
    assert shown[0]["text/plain"] == "passed: ring"


def test_only_the_server_of_ranks_imports_the_checks_with_workbook():
    code = """
        import sys, workbook
        from labkit.runtime.preload import FOR_TRAINING
        print([m for m in [*sys.modules, *FOR_TRAINING] if m.startswith("workbook.check")])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['workbook.check']"


# Words


def test_a_mistake_has_words_and_tells_of_those_inside_it():
    with pytest.raises(AssertionError, match="no words"):
        Mistake("ring.nonsense")
    overwrote = "they overwrote the sum, instead of being added to it"
    inner = Mistake("sum.overwritten", rank=3)
    whole = Mistake("value.zeros")
    outer = Mistake("told.row", row="value", what=whole, why=inner, also=[None, inner])
    assert outer.ids == ["told.row", "value.zeros", "sum.overwritten", "sum.overwritten"]
    held = f"it holds only the values of rank 3: {overwrote}"
    assert str(outer) == f"value: it is all zeros: {held}. {held}"
    assert named("a page's {own} words") == "a page's {own} words"


def test_no_two_mistakes_have_the_same_words():
    stories = {"run.stuck", "run.error"}
    words = [text for id, text in WORDS.items() if id not in stories]
    assert len(words) == len({*words})


# What a value is made of


def test_contents_tell_how_often_each_piece_is_in_a_value():
    case = Case(world_size=4, size=96)
    basis = {
        (rank, chunk): piece
        for rank in range(4)
        for chunk, piece in enumerate(split_chunks(case.tensor(rank), 4))
    }
    value = basis[0, 1] + 2 * basis[3, 1] + basis[2, 0] / 4
    assert contents(value, basis, 1) == {(0, 1): 1, (3, 1): 2, (2, 0): 0.25}
    assert contents(torch.rand(24), basis, 1) is None
    assert contents(value[:2], basis, 1) is None


@pytest.mark.parametrize(
    ("found", "id"),
    [
        ({(1, 0): 1}, "value.unchanged"),
        ({(2, 0): 1}, "sum.overwritten"),
        ({(0, 0): 1, (1, 0): 2, (2, 0): 1}, "sum.own_twice"),
        ({(0, 0): 1, (1, 0): 1, (2, 0): 3}, "sum.twice"),
        ({(0, 0): 1, (2, 0): 1}, "sum.own_missing"),
        ({(0, 0): 1, (1, 0): 1}, "sum.lacks_one"),
        ({(0, 0): 3, (1, 0): 3, (2, 0): 3}, "sum.not_divided"),
        ({(0, 0): 2, (1, 0): 2, (2, 0): 2}, "sum.scaled"),
        ({(0, 0): 1, (1, 1): 1}, "chunk.foreign"),
        ({(0, 0): 2, (1, 0): 1}, "sum.other"),
    ],
)
def test_a_wrong_sum_has_a_name(found, id):
    everyone = {(rank, 0): 1.0 for rank in range(3)}
    assert name_mistake(found, everyone, (1, 0), 3).id == id


@pytest.mark.parametrize(
    ("found", "id"),
    [
        ({(0, 0): 0.25, (1, 0): 0.25}, "sum.scaled"),
        ({(0, 0): 1, (1, 0): 1}, "sum.not_divided"),
        ({(1, 0): 0.5}, "sum.lacks_one"),
        ({(0, 0): 0.5}, "sum.overwritten"),
    ],
)
def test_a_wrong_mean_has_a_name(found, id):
    mean = {(rank, 0): 0.5 for rank in range(2)}
    assert name_mistake(found, mean, (1, 0), 2).id == id


# No two mistakes lead to the same answers


def test_no_two_mistakes_in_cutting_look_alike():
    right = tuple(placement.search(case) for case in placement.CASES)
    found = {right: "none"}
    for id, rule in placement.MISTAKES:
        splits = tuple(placement.search(case, **rule) for case in placement.CASES)
        assert found.setdefault(splits, id) == id


def test_no_two_mistakes_about_a_split_lead_to_the_same_numbers():
    cases = {"bytes": placement.BYTE_CASES, "step": placement.STEP_CASES}
    tables = {"bytes": placement.BYTE_MISTAKES, "step": placement.STEP_MISTAKES}
    right = {"bytes": placement._crossing, "step": placement._step}
    for which, mistakes in tables.items():
        for one, other in itertools.combinations([right[which], *mistakes.values()], 2):
            assert any(one(*case) != other(*case) for case in cases[which])


def test_each_mistake_in_taking_times_leads_to_other_numbers():
    numbers = []
    for cost_s in (1.5, 0.6):
        watch = fairness.Stopwatch()
        in_turns(watch.contender("a", 1.0), watch.contender("b", cost_s), fairness.REPEATS[0])
        mistaken = fairness.mistaken_ratios(watch.seconds).values()
        numbers.append([fairness.due_ratio(watch.seconds), *mistaken])
    found = {tuple(round(number, 3) for number in pair) for pair in zip(*numbers)}
    assert len(found) == len(numbers[0])


def test_a_stream_right_on_paper_is_trained_with_on_ranks():
    def right_at_first(stage, P, M):
        """Right on paper; wrong for P = 2 and M = 5, which only the ranks ask for."""
        return in_words(stage, P, M) if (P, M) != (2, 5) else map(str, gpipe(stage, P, M + 1))

    verdict = check.pipeline.one_f_one_b(right_at_first, world_sizes=(2,))
    assert verdict.ids[1:] == ["run.error"]


def test_an_untouched_stub_is_told_without_a_run(monkeypatch):
    def untouched(comm, tensor):
        """tensor: [N]."""
        raise NotImplementedError

    def refuse(*args):
        pytest.fail("ranks were started")

    monkeypatch.setattr(grader, "outcomes_of", refuse)
    assert check.naive.all_reduce(untouched).status == "not attempted yet"
