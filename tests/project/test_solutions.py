"""The exercises' solutions: each one in a fold, put in the place of its stub, passes its check."""

import ast
import contextlib
import io
import itertools
import re
from pathlib import Path
from unittest import mock

import nbformat
import pytest
from graded import in_turn

from workbook.exercises.grader import grader

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
SOLUTION = re.compile(r"<summary>Solution</summary>.*?```python\n(.*?)```", re.DOTALL)
NUMBERS = itertools.count()
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


@pytest.mark.slow
@pytest.mark.parametrize(("parts", "section"), list(exercises()))
def test_the_solution_passes_its_check(parts, section):
    """On one world size in turn: it is close to the library's own, which is tested on all."""
    names, solution = namespace_for(parts), solution_of(section)
    on_ranks = grader.grade_on_ranks

    def in_turns(fn, exercise, world_sizes):
        return on_ranks(fn, exercise, in_turn(world_sizes, next(NUMBERS)))

    out = contextlib.redirect_stdout(io.StringIO())
    with out as said, mock.patch.object(grader, "grade_on_ranks", in_turns):
        # An exercise may be built on those before it.
        for before in filter(is_exercise, parts[: parts.index(section)]):
            exec(solution_of(before), names)
        stub, *rest = [cell.source for cell in section if cell.cell_type == "code"]
        solved = next(node.name for node in ast.parse(solution).body)
        assert solved in [getattr(node, "name", "") for node in ast.parse(stub).body]
        for source in (stub, solution, *rest):
            exec(source, names)
    assert said.getvalue().startswith(("solved", "passed")), said.getvalue()
