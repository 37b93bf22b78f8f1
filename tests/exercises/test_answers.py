"""Every check passes the right answers, and names the mistake in each wrong one."""

import importlib
from pathlib import Path

import pytest
from graded import Answers, graded

from workbook.exercises.grader.report import PASSED

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
WRONG = [(key, fn) for key, answers in ALL.items() for fn in answers.wrong]


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
        found = verdicts[key, (fn, size)]
        assert found.status == PASSED, found


@pytest.mark.parametrize(("key", "fn"), WRONG, ids=label)
def test_a_wrong_answer_is_refused(key, fn, verdicts):
    found = verdicts[key, fn]
    assert repr(found).startswith("not yet: "), found
    assert "the check itself failed" not in repr(found), found
