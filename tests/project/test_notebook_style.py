"""The notebooks as stored: executed, clean, and in the house style. Nothing is run here."""

import json
import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CELL_LINES = 20
MAX_SETUP_LINES = 8
MIN_ALT_CHARS = 15
MIN_PROSE_SHARE = 0.5
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    """Index in the notebook and cell, for each code cell that is not empty."""
    cells = enumerate(read(path).cells)
    return [(i, cell) for i, cell in cells if cell.cell_type == "code" and cell.source.strip()]


def outputs(path):
    return [(i, cell, output) for i, cell in code_cells(path) for output in cell.outputs]


def num_lines(cell):
    return sum(1 for line in cell.source.splitlines() if line.strip())


def test_it_is_a_valid_notebook_of_the_standard_kernel(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert dict(notebook.metadata.kernelspec) == KERNEL
    assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem)


def test_every_cell_was_run_in_order(path):
    counts = [cell.execution_count for _, cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1)), "make notebooks"


def test_no_cell_ended_in_an_error_that_is_not_meant(path):
    for index, cell, output in outputs(path):
        meant = "raises-exception" in cell.metadata.get("tags", [])
        assert meant or output.output_type != "error", f"cell {index}: {output.get('ename')}"


def test_nothing_is_stored_that_changes_by_itself(path):
    notebook = read(path)
    assert "widgets" not in notebook.metadata
    for index, cell in enumerate(notebook.cells):
        assert not {"execution", "ExecuteTime"} & set(cell.metadata), f"cell {index}"


def test_no_output_shows_this_machine(path):
    for index, _, output in outputs(path):
        text = json.dumps(output)
        for place in ("/home/", "/Users/", "/root/", "/tmp/", str(ROOT)):
            assert place not in text, f"cell {index} shows {place}"


def test_warnings_are_not_silenced(path):
    source = "\n".join(cell.source for _, cell in code_cells(path))
    assert not re.search(r"filterwarnings\(\s*[\"']ignore", source)


def test_prose_comes_first(path):
    cells = read(path).cells
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    led = [cells[i - 1].cell_type == "markdown" for i, _ in code_cells(path)]
    assert sum(led) >= MIN_PROSE_SHARE * len(led), f"{sum(led)} of {len(led)} follow prose"


def test_cells_are_short(path):
    sizes = {index: num_lines(cell) for index, cell in code_cells(path)}
    assert not {i: n for i, n in sizes.items() if n > MAX_CELL_LINES}
    assert next(iter(sizes.values())) <= MAX_SETUP_LINES, "the setup cell"


def test_figures_have_alt_text(path):
    for index, _, output in outputs(path):
        data = output.get("data", {})
        assert "image/png" not in data, f"cell {index}: a plain image carries no alt text"
        for image in re.findall(r"<img\b[^>]*>", data.get("text/html", "")):
            alt = re.search(r'\balt="([^"]*)"', image)
            assert alt, f"cell {index}: a figure without alt text"
            assert len(alt[1]) >= MIN_ALT_CHARS, f"cell {index}: {alt[0]}"
