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
    "labkit": (1664, 9348),
    "labkit/backend": (925, 5719),
    "labkit/collectives": (1265, 6896),
    "labkit/comm": (3996, 23439),
    "labkit/costs": (1124, 5569),
    "labkit/horovod": (1481, 9519),
    "labkit/placement": (605, 3333),
    "labkit/runtime": (4438, 25635),
    "labkit/schedules": (953, 4281),
    "labkit/strategies": (3506, 21869),
    "labkit/tracing": (1094, 6879),
    "labkit/training": (2604, 17382),
    "labkit/workload": (2065, 11781),
    "notebooks/scripts": (815, 4598),
    "tests": (5988, 40653),
    "tests/backend": (1927, 14233),
    "tests/collectives": (1126, 10684),
    "tests/comm": (2658, 19646),
    "tests/costs": (574, 5592),
    "tests/exercises": (5583, 36779),
    "tests/gpu": (703, 5655),
    "tests/measure": (2107, 17698),
    "tests/notebook": (1570, 11587),
    "tests/placement": (322, 3435),
    "tests/plots": (1052, 11168),
    "tests/pretended": (1038, 5944),
    "tests/project": (3787, 25431),
    "tests/runtime": (3061, 20790),
    "tests/schedules": (681, 5743),
    "tests/strategies": (2349, 20263),
    "tests/tracing": (715, 5712),
    "tests/training": (2308, 19216),
    "tests/widgets": (462, 3841),
    "tests/workload": (1428, 12349),
    "tools": (1690, 11405),
    "workbook": (381, 1993),
    "workbook/exercises": (9088, 61881),
    "workbook/measure": (5133, 34305),
    "workbook/notebook": (2557, 15152),
    "workbook/plots": (2649, 19204),
    "workbook/widgets": (849, 5573),
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
