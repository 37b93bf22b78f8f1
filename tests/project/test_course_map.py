"""One table says which pages there are; what shows it, and every link, agrees with the folder."""

import re
import sys
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))
import course_map  # noqa: E402

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
LINK = re.compile(r"\]\((?:notebooks/)?(\d\d_\w+)\.ipynb(?:#([^)]*))?\)")


def markdown(path):
    cells = nbformat.read(path, as_version=4).cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def test_the_table_has_every_page_in_the_folder_in_reading_order():
    assert [path.stem for path in NOTEBOOKS] == list(course_map.PAGES)


def test_readme_page_00_and_every_page_s_neighbors_are_made_from_it():
    for path, text in course_map.files().items():
        assert path.read_text() == text, f"{path.name}: python tools/course_map.py"


def headings(path):
    text = path.read_text() if path.suffix == ".md" else markdown(path)
    return re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)


@pytest.mark.parametrize("path", [ROOT / "README.md", *NOTEBOOKS], ids=lambda path: path.stem)
def test_links_lead_to_pages_and_sections_that_are_there(path):
    text = path.read_text() if path.suffix == ".md" else markdown(path)
    here = [(path.stem, anchor) for anchor in re.findall(r"\]\(#([^)]*)\)", text)]
    for stem, anchor in LINK.findall(text) + here:
        target = path if stem == path.stem else ROOT / "notebooks" / f"{stem}.ipynb"
        assert target.is_file(), f"{path.name} links to {stem}"
        # A heading's address is its text with a dash for each blank; GitHub's are in lower case.
        found = {
            heading.strip().replace("`", "").replace(" ", "-") for heading in headings(target)
        }
        found = {heading.lower() for heading in found} if target.suffix == ".md" else found
        assert not anchor or anchor in found, f"{path.name} links to {stem}#{anchor}"
