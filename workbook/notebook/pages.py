"""The pages of the workbook: where they are, which exercises they have, which one is open."""

import contextlib
import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Page:
    """A notebook: its file's name without ending, its title, the exercises that it checks.

    ``exercises``: the heading above each, by its name in ``check`` (``ring.all_reduce``).
    """

    name: str
    title: str
    exercises: dict[str, str]


def current_page() -> str:
    """The name of the notebook that this process is the kernel of; empty if it is not known."""
    main = sys.modules.get("__main__")
    named = os.environ.get("JPY_SESSION_NAME") or getattr(main, "__vsc_ipynb_file__", "")
    return Path(named).stem if str(named).endswith(".ipynb") else ""


def workbook_pages() -> list[Page]:
    """The pages in reading order; none where labkit is installed without them."""
    # A notebook's kernel is started in the notebooks' folder, a command in the one above.
    current = Path.cwd()
    folders = [current / "notebooks", Path(__file__).resolve().parents[2] / "notebooks"]
    if current.name == "notebooks":
        folders.insert(0, current)
    folder = next(filter(Path.is_dir, folders), None)
    pages = []
    if folder is not None:
        for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")):
            # A page that is being written, or was damaged, is left out.
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                pages.append(_read_page(path))
    return pages


def _read_page(path: Path) -> Page:
    headings = []
    exercises: dict[str, str] = {}
    for cell in json.loads(path.read_bytes())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            headings += re.findall(r"^#+ (.+)", source, re.MULTILINE)
            continue
        # Each is called as check.ROOM.NAME(function), and its verdict has that name.
        for name in re.findall(r"\bcheck\.([a-z_]+\.\w+)\(", source):
            exercises.setdefault(name, headings[-1])
    return Page(path.stem, headings[0], exercises)
