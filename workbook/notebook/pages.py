"""The pages of the workbook: where they are, which exercises they have, which one is open."""

import contextlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

# The pages of the short path, about twelve hours, in its order.
SHORT_PATH = (
    "00_start_here",
    "01_one_device",
    "06_ring_all_reduce",
    "03_distributed_data_parallel",
    "09_pipeline",
    "10_tensor_parallel",
    "11_sharded_data_parallel",
    "16_choosing",
)
# What stands before the exercise of a page that counts most.
ONE_EXERCISE = "**If you do one exercise on this page, do this one.**"


@dataclass(frozen=True)
class Page:
    """A notebook: its file's name without ending, its title, the exercises that it checks.

    Attributes:
        exercises: the heading above each, by its name in ``check`` (``ring.all_reduce``).
        first_choice: the name of the exercise to do if one does only one; empty if none is marked.
    """

    name: str
    title: str
    exercises: dict[str, str]
    first_choice: str = ""


def current_page() -> str:
    """The name of the notebook that this process is the kernel of; empty if it is not known."""
    main = sys.modules.get("__main__")
    named = os.environ.get("JPY_SESSION_NAME") or getattr(main, "__vsc_ipynb_file__", "")
    return Path(named).stem if str(named).endswith(".ipynb") else ""


def page_files() -> list[Path]:
    """The notebooks in reading order; none where labkit is installed without them."""
    # A notebook's kernel is started in the notebooks' folder, a command in the one above.
    current = Path.cwd()
    folders = [current / "notebooks", Path(__file__).resolve().parents[2] / "notebooks"]
    if current.name == "notebooks":
        folders.insert(0, current)
    folder = next(filter(Path.is_dir, folders), None)
    if folder is None:
        return []
    return sorted(folder.glob("[0-9][0-9]_*.ipynb"))


def workbook_pages() -> list[Page]:
    """The pages in reading order, as they are in ``page_files``."""
    pages = []
    for path in page_files():
        # A page that is being written, or was damaged, is left out.
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            pages.append(_read_page(path))
    return pages


def present_name(name: str) -> str:
    """The name that a page has now: its number may have been another one before."""
    for path in page_files():
        if path.stem[2:] == name[2:]:
            return path.stem
    return name


def _read_page(path: Path) -> Page:
    headings = []
    exercises: dict[str, str] = {}
    first_choice = ""
    is_marked = False
    for cell in json.loads(path.read_bytes())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            headings += re.findall(r"^#+ (.+)", source, re.MULTILINE)
            # (It may go over the end of a line.)
            is_marked = is_marked or ONE_EXERCISE in " ".join(source.split())
            continue
        # Each is called as check.ROOM.NAME(function), and its verdict has that name.
        for name in re.findall(r"\bcheck\.([a-z_]+\.\w+)\(", source):
            exercises.setdefault(name, headings[-1])
            if is_marked and not first_choice:
                first_choice = name
    return Page(path.stem, headings[0], exercises, first_choice)
