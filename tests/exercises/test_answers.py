"""Every check passes the right answers, and names the mistake in each wrong one."""

import importlib
import inspect
from pathlib import Path

import pytest
from graded import Answers, a_stub, graded

from workbook import check

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


@pytest.fixture(scope="module")
def verdicts(request):
    """By check and answer: of the checks of which a test is to run."""
    tests = [item for item in request.session.items if item.path == request.path]
    keys = [item.callspec.params.get("key") for item in tests if hasattr(item, "callspec")]
    return graded({key: ALL[key] for key in ALL if key in keys})


def label(value):
    return getattr(value, "__name__", None) if callable(value) else str(value)


@pytest.mark.parametrize(("key", "fn"), RIGHT, ids=label)
def test_a_right_answer_passes(key, fn, verdicts):
    for size in ALL[key].sizes_of(fn):
        assert verdicts[key, (fn, size)].works, verdicts[key, (fn, size)]


@pytest.mark.parametrize(
    ("key", "fn", "due"), [(key, fn, due) for key, fn, *due in WRONG], ids=label
)
def test_a_wrong_answer_is_told_by_its_mistake(key, fn, due, verdicts):
    found = verdicts[key, fn]
    assert repr(found).startswith("not yet: "), found


@pytest.mark.parametrize("key", [key for key, answers in ALL.items() if answers.right])
def test_a_stub_is_not_attempted_yet(key, verdicts):
    found = verdicts[key, a_stub]
    assert repr(found) == f"not attempted yet: {found.name}"


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


@pytest.mark.parametrize("named", named_checks(), ids=lambda f: f"{f.__module__}.{f.__name__}")
def test_each_check_has_five_right_answers_in_other_clothes(named):
    right = [
        fn
        for answers in ALL.values()
        for fn in answers.right
        if getattr(answers.check, "func", answers.check) is named
    ]
    assert len(right) >= 6
