"""The exercises' solutions: each one in a fold, put in the place of its stub, passes its check."""

import ast
import contextlib
import io
import re
from functools import partial
from pathlib import Path
from unittest import mock

import nbformat
import pytest
from graded import in_shared_runs, in_turn

from workbook.check import Verdict
from workbook.exercises.grader import grader
from workbook.exercises.grader.report import PASSED

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
SOLUTION = re.compile(r"<summary>Solution</summary>.*?```python\n(.*?)```", re.DOTALL)
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef)


def sections(cells):
    """The notebook as lists of cells, each beginning with a heading."""
    found = [[]]
    for cell in cells:
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            found.append([])
        found[-1].append(cell)
    return found


def is_exercise(section):
    return bool(section) and section[0].source.startswith("### Exercise")


def defines_only(source):
    """Whether a cell defines names that an exercise may use, and runs nothing."""
    for node in ast.parse(source).body:
        text = ast.unparse(node)
        decides = text.startswith(("run = ", "DEVICE = ", "labkit.warm_up("))
        if not isinstance(node, DEFINITIONS) and not decides:
            return False
    return True


def exercises():
    for path in NOTEBOOKS:
        parts = sections(nbformat.read(path, as_version=4).cells)
        for number, section in enumerate(filter(is_exercise, parts), start=1):
            yield pytest.param(parts, section, id=f"{path.stem}-{number}")


def namespace_for(parts):
    """What the cells before the exercises define; a cell that runs something is left out."""
    # No module of this name exists: functions travel to the ranks by value, as a notebook's do.
    names = {"__name__": "cells_of_a_notebook"}
    for section in parts:
        for cell in section:
            code = cell.cell_type == "code" and not is_exercise(section)
            if code and defines_only(cell.source):
                exec(re.sub(r"^labkit\.warm_up\(.*\)$", "", cell.source, flags=re.M), names)
    return names


def solution_of(section):
    (solution,) = SOLUTION.findall("\n".join(cell.source for cell in section))
    return solution


class Solved:
    """An exercise's cells, run with the solution in the place of the stub.

    Attributes:
        said: what they printed.
        asked: (function, exercise, world sizes) of what is to be graded on ranks, which passes
            for the time being.
        error: what was raised instead.
    """

    def __init__(self, parts, section):
        self.asked, self.error = [], None
        with contextlib.redirect_stdout(io.StringIO()) as out:
            try:
                with mock.patch.object(grader, "grade_on_ranks", self.note):
                    self.run(parts, section)
            except Exception as error:
                self.error = error
        self.said = out.getvalue()

    def note(self, *asked):
        self.asked.append(asked)
        return Verdict(asked[1].name, PASSED)

    def run(self, parts, section):
        solution = solution_of(section)
        names = namespace_for(parts)
        # An exercise may be built on those before it.
        for before in filter(is_exercise, parts[: parts.index(section)]):
            exec(solution_of(before), names)
        stub, *rest = [cell.source for cell in section if cell.cell_type == "code"]
        solved = next(node.name for node in ast.parse(solution).body)
        assert solved in [getattr(node, "name", "") for node in ast.parse(stub).body]
        for source in (stub, solution, *rest):
            exec(source, names)


@pytest.fixture(scope="module")
def solved(request):
    """By exercise, of those that are to be tested: the cells' run, and the ranks' verdicts.

    The solutions take turns with the world sizes: a solution is close to the library's own
    version, which is tested on all of them.
    """
    found, gradings = {}, {}
    for item in request.session.items:
        if item.fspath == request.fspath and "section" in getattr(item, "fixturenames", ()):
            one = found[item.callspec.id] = Solved(*item.callspec.params.values())
            for number, (fn, exercise, world_sizes) in enumerate(one.asked):
                for size in in_turn(world_sizes, len(gradings)):
                    key = item.callspec.id, number, size
                    gradings[key] = partial(grader.grade_on_ranks, fn, exercise, (size,))
    verdicts = in_shared_runs(gradings)
    return {
        name: (one, [verdict for key, verdict in verdicts.items() if key[0] == name])
        for name, one in found.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "section"), list(exercises()))
def test_the_solution_passes_its_check(parts, section, solved, request):
    one, verdicts = solved[request.node.callspec.id]
    if one.error:
        raise one.error
    assert one.said.startswith(("solved", "passed")), one.said
    assert len(verdicts) >= len(one.asked)
    for verdict in verdicts:
        assert verdict.passed, verdict
