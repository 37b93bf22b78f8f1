"""CONTRIBUTING.md says where things are: its table names files and definitions that exist."""

import ast
import re
from pathlib import Path

import pytest
from test_setup import FLOORS

ROOT = Path(__file__).resolve().parents[2]
ROW = re.compile(r"^\| (.+) \| `((?:labkit|workbook)/[\w/]+\.py)` \| `(\w+)` \|$", re.MULTILINE)
ANSWERS = ROW.findall((ROOT / "CONTRIBUTING.md").read_text())


def defined_in(path: Path) -> set[str]:
    """Functions, methods, classes and module constants."""
    tree = ast.parse(path.read_text())
    names = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    constants = (t for node in tree.body if isinstance(node, ast.Assign) for t in node.targets)
    return names | {target.id for target in constants if isinstance(target, ast.Name)}


@pytest.mark.parametrize(("what", "path", "name"), ANSWERS, ids=[row[0] for row in ANSWERS])
def test_each_answer_is_there(what, path, name):
    assert (ROOT / path).is_file(), f"{what}: there is no {path}"
    assert name in defined_in(ROOT / path), f"{what}: {path} does not define {name}"


def test_the_floors_are_those_that_the_code_is_held_to():
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    floors = [*FLOORS["workbook"][::-1], *FLOORS["labkit"][::-1]]
    assert [set(re.findall(r"\w+", row)) for row in rows] == floors
