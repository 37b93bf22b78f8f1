"""Every check passes the right answers, and names the mistake in each wrong one."""

import functools
import importlib
import inspect
from pathlib import Path

import pytest
from graded import Answers, in_shared_runs

from labkit import check
from labkit.check.grading.words import WORDS

pytestmark = pytest.mark.slow

SETS = {
    path.stem: importlib.import_module(f"answers.{path.stem}").ANSWERS
    for path in sorted(Path(__file__).parent.joinpath("answers").glob("[!_]*.py"))
}


def joined() -> dict[str, Answers]:
    """All answers, those of two files to one check together, so that they share their runs."""
    found: dict[tuple, tuple[str, Answers]] = {}
    for name, checks in SETS.items():
        for number, answers in enumerate(checks):
            which = answers.check, answers.on
            first, same = found.get(
                which, (f"{name}-{number}", answers._replace(right=[], wrong=[]))
            )
            right, wrong = same.right + answers.right, same.wrong + answers.wrong
            found[which] = first, same._replace(right=right, wrong=wrong)
    return dict(found.values())


ALL = joined()
RIGHT = [(key, fn) for key, answers in ALL.items() for fn in answers.right]
WRONG = [(key, *case) for key, answers in ALL.items() for case in answers.wrong]


@functools.cache
def verdicts_of(file):
    """The verdicts on all answers of a file, which share runs, by (check, answer)."""
    shared, alone = {}, {}
    for key, answers in ALL.items():
        if key.rpartition("-")[0] == file:
            for found, own in zip((shared, alone), answers.gradings()):
                found |= {(key, what): grade for what, grade in own.items()}
    return in_shared_runs(shared) | {what: grade() for what, grade in alone.items()}


def verdict(key, *what):
    return verdicts_of(key.rpartition("-")[0])[key, what if len(what) > 1 else what[0]]


def label(value):
    return getattr(value, "__name__", None) if callable(value) else str(value)


@pytest.mark.parametrize(("key", "fn"), RIGHT, ids=label)
def test_a_right_answer_passes(key, fn):
    for size in ALL[key].sizes or [None]:
        assert verdict(key, fn, size).works, verdict(key, fn, size)


@pytest.mark.parametrize(
    ("key", "fn", "due"), [(key, fn, due) for key, fn, *due in WRONG], ids=label
)
def test_a_wrong_answer_is_told_by_its_mistake(key, fn, due):
    found = verdict(key, fn)
    assert repr(found).startswith("not yet: ")
    for one in due:
        if one.startswith("not "):
            assert one.removeprefix("not ") not in found.ids
        else:
            assert one in repr(found) if " " in one else one in found.ids, found


@pytest.mark.parametrize("key", [key for key, answers in ALL.items() if answers.right])
def test_a_stub_is_not_attempted_yet(key):
    def stub(*args):
        raise NotImplementedError

    found = ALL[key].grade(stub)
    assert repr(found) == f"not attempted yet: {found.name}"


def test_every_mistake_is_reached_by_an_answer():
    reached = {i for key, fn, *_ in WRONG for i in verdict(key, fn).ids}
    # That a function is the library's own is told where all is right.
    sizes = {key: ALL[key].sizes or [None] for key in ALL}
    reached |= {i for key, fn in RIGHT for size in sizes[key] for i in verdict(key, fn, size).ids}
    assert sorted({*WORDS} - reached) == []


def named_checks():
    """The functions of each set that grade ``fn``."""
    sets = [getattr(check, name) for name in check.__all__]
    return [
        function
        for module in filter(inspect.ismodule, sets)
        for function in filter(inspect.isfunction, vars(module).values())
        if function.__module__ == module.__name__
        and not function.__name__.startswith("_")
        and [*inspect.signature(function).parameters][:1] == ["fn"]
    ]


@pytest.mark.parametrize("graded", named_checks(), ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_each_check_has_five_right_answers_in_other_clothes(graded):
    right = [
        fn
        for answers in ALL.values()
        for fn in answers.right
        if getattr(answers.check, "func", answers.check) is graded
    ]
    assert len(right) >= 6
