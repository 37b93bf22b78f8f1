"""The pages of the workbook: where they are, which exercises they have, which one is open."""

import ast
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# Checks that are called with the learner's function; all others are named by room and function.
_OWN_NAME = {"returns", "answers"}


@dataclass(frozen=True)
class Page:
    """A notebook: its file's name without ending, its title, the exercises that it checks."""

    name: str
    title: str
    exercises: tuple[str, ...]


def current_page() -> str:
    """The name of the notebook that this process is the kernel of; empty if it is not known."""
    main = sys.modules.get("__main__")
    named = os.environ.get("JPY_SESSION_NAME") or getattr(main, "__vsc_ipynb_file__", "")
    return Path(named).stem if str(named).endswith(".ipynb") else ""


def workbook_pages() -> list[Page]:
    """The pages in reading order; none where labkit is installed without them."""
    # A notebook's kernel is started in the notebooks' folder, a command in the one above.
    here, clone = Path.cwd(), Path(__file__).resolve().parents[2]
    places = [here / "notebooks", clone / "notebooks"]
    if here.name == "notebooks":
        places.insert(0, here)
    folder = next(filter(Path.is_dir, places), None)
    if folder is None:
        return []
    pages = []
    for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")):
        # A page that is being written, or was damaged, is left out.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            pages.append(_read(path, path.stat().st_mtime_ns))
    return pages


@lru_cache(maxsize=64)
def _read(path: Path, _changed_ns: int) -> Page:
    cells = json.loads(path.read_bytes())["cells"]
    heads = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    title = next(heads, path.stem).partition("\n")[0].lstrip("# ").strip()
    sources = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    names = [name for source in sources if "check." in source for name in exercises_in(source)]
    return Page(path.stem, title, tuple(dict.fromkeys(names)))


def exercises_in(source: str) -> list[str]:
    """The names that the checks in a cell give their verdicts, in the order of the cell."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a learner's cell, or one with magics
        return []
    return list(_names(tree))


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        room, _, function = ast.unparse(node.func).rpartition(".")
        room = room.removeprefix("workbook.")
        # What is called on a verdict, such as ``own_run``, is no check.
        if room.startswith("check.") and "(" not in room:
            yield f"{room.removeprefix('check.')}.{function}"
        elif room == "check" and (function in _OWN_NAME or function == "Exercise"):
            yield from _own_name(node, function)


def _own_name(call: ast.Call, function: str) -> Iterator[str]:
    named = [one.value for one in call.keywords if one.arg == "name"]
    for value in (named or call.args)[:1]:
        if isinstance(value, ast.Constant):
            yield str(value.value)
        elif isinstance(value, ast.Name) and function != "Exercise":
            yield value.id
