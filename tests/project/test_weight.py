"""Weight: lines and code tokens of each room may only fall.

A change that raises a number names in its message what it removes elsewhere, or the issue that
gives it a budget. ``python tests/project/test_weight.py`` prints the table as it is now.
"""

import ast
import io
import subprocess
import tokenize
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
LAYOUT |= {tokenize.ENCODING, tokenize.ENDMARKER}

# Room -> lines and code tokens at most.
LIMITS = {
    "data": (55, 281),
    "labkit": (1109, 6090),
    "labkit/backend": (628, 3970),
    "labkit/collectives": (965, 5190),
    "labkit/comm": (2858, 17044),
    "labkit/costs": (954, 5290),
    "labkit/horovod": (1097, 7043),
    "labkit/placement": (371, 2144),
    "labkit/runtime": (2451, 15355),
    "labkit/schedules": (1001, 5093),
    "labkit/strategies": (3879, 26923),
    "labkit/tracing": (787, 5189),
    "labkit/training": (1726, 12199),
    "labkit/workload": (1225, 7807),
    "notebooks/scripts": (870, 4944),
    "tests": (3454, 24839),
    "tests/backend": (1295, 9251),
    "tests/collectives": (665, 6576),
    "tests/comm": (1041, 8342),
    "tests/costs": (416, 4051),
    "tests/exercises": (3943, 26787),
    "tests/gpu": (492, 4072),
    "tests/measure": (791, 6085),
    "tests/notebook": (782, 6012),
    "tests/placement": (121, 1167),
    "tests/plots": (593, 6515),
    "tests/pretended": (864, 4867),
    "tests/project": (1664, 11627),
    "tests/runtime": (1495, 9698),
    "tests/schedules": (466, 3925),
    "tests/strategies": (1701, 15808),
    "tests/tracing": (212, 1639),
    "tests/training": (1031, 8552),
    "tests/widgets": (280, 2196),
    "tests/workload": (393, 3825),
    "tools": (1485, 11230),
    "tools/site": (101, 653),
    "workbook": (416, 2407),
    "workbook/exercises": (6659, 51743),
    "workbook/measure": (1806, 14139),
    "workbook/notebook": (1254, 7745),
    "workbook/plots": (1717, 12788),
    "workbook/widgets": (681, 4848),
}
# A room that has become lighter by more than this has its new weight written down here.
SLACK = 1.03


def tokens(text: str) -> int:
    """Code tokens: without comments, docstrings and blank lines; only less code is lighter."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    }
    return sum(
        token.type not in LAYOUT
        and not (token.type == tokenize.STRING and token.start[0] in docstrings)
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
    )


def weigh() -> dict[str, tuple[int, int]]:
    """Room (``labkit/comm``, ``tools``) -> its lines and code tokens, of the files under git."""
    command = ["git", "ls-files", "*.py", "*.pyi"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git clone: which files belong to the repository is not known")
    lines, code = Counter(), Counter()
    for name in listed.stdout.split():
        if not (ROOT / name).exists():
            continue
        text = (ROOT / name).read_text()
        parts = name.split("/")
        room = "/".join(parts[: min(2, len(parts) - 1)])
        lines[room] += text.count("\n")
        code[room] += tokens(text)
    return {room: (lines[room], code[room]) for room in sorted(lines)}


def test_every_room_weighs_at_most_what_it_did():
    weights = weigh()
    assert weights.keys() == LIMITS.keys(), "a new room, or one that went: LIMITS lists all"
    heavier = {
        room: (now, LIMITS[room])
        for room, now in weights.items()
        if any(is_now > limit for is_now, limit in zip(now, LIMITS[room]))
    }
    assert not heavier, f"(lines, tokens) now and at most: {heavier}"


def test_the_table_falls_with_the_rooms():
    lighter = {
        room: now
        for room, now in weigh().items()
        if any(is_now * SLACK < limit for is_now, limit in zip(now, LIMITS[room]))
    }
    assert not lighter, f"lighter than the table says, write it down: {lighter}"


if __name__ == "__main__":
    for room, weight in weigh().items():
        print(f'    "{room}": {weight},')
