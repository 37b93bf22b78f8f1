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
    "labkit": (1124, 6139),
    "labkit/backend": (664, 4158),
    "labkit/collectives": (1047, 5410),
    "labkit/comm": (3283, 18627),
    "labkit/costs": (719, 3472),
    "labkit/horovod": (1145, 7167),
    "labkit/placement": (412, 2258),
    "labkit/runtime": (2639, 15881),
    "labkit/schedules": (777, 3288),
    "labkit/strategies": (2389, 14379),
    "labkit/tracing": (845, 5273),
    "labkit/training": (1942, 12884),
    "labkit/workload": (1147, 6788),
    "notebooks/scripts": (815, 4598),
    "tests": (5412, 36611),
    "tests/backend": (1490, 10781),
    "tests/collectives": (733, 7134),
    "tests/comm": (1753, 13625),
    "tests/costs": (338, 3537),
    "tests/exercises": (5485, 36092),
    "tests/gpu": (465, 3707),
    "tests/measure": (1448, 11343),
    "tests/notebook": (1380, 10323),
    "tests/placement": (196, 2007),
    "tests/plots": (1052, 11154),
    "tests/pretended": (1038, 5944),
    "tests/project": (3401, 22796),
    "tests/runtime": (2385, 16587),
    "tests/schedules": (491, 4194),
    "tests/strategies": (1511, 13397),
    "tests/tracing": (450, 3327),
    "tests/training": (1926, 15615),
    "tests/widgets": (462, 3841),
    "tests/workload": (773, 7160),
    "tools": (1325, 9332),
    "workbook": (468, 2509),
    "workbook/exercises": (8218, 56710),
    "workbook/measure": (3999, 27483),
    "workbook/notebook": (2166, 13268),
    "workbook/plots": (2645, 19186),
    "workbook/widgets": (844, 5549),
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
