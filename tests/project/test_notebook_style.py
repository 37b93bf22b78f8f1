"""The notebooks as stored: executed, clean, and in the house style. Nothing is run here."""

import ast
import json
import re
from collections import Counter
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CELL_LINES, MAX_SETUP_LINES = 20, 8
MIN_ALT_CHARS = 15
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}

ONE_HINT_OR_MORE = "15_detective_cases"  # its cases need fewer; all other exercises have three

STUB = "raise NotImplementedError"
TITLE = re.compile(r"### Exercise (\d+): \S.*\n\n\*(Easy|Medium|Hard)[^*]*\b\d+ minutes\b[^*]*\*")
FOLD = re.compile(r"<details><summary>(.*?)</summary>(.*?)</details>", re.DOTALL)

pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(path):
    """Index in the notebook and cell, for each code cell that is not empty."""
    cells = enumerate(read(path).cells)
    return [(i, cell) for i, cell in cells if cell.cell_type == "code" and cell.source.strip()]


def test_it_is_stored_as_it_was_run_and_clean(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert dict(notebook.metadata.kernelspec) == KERNEL
    assert "widgets" not in notebook.metadata
    assert re.fullmatch(r"\d\d_[a-z0-9_]+", path.stem)
    counts = [cell.execution_count for _, cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1)), "make notebooks"
    for index, cell in code_cells(path):
        assert not {"execution", "ExecuteTime"} & set(cell.metadata), f"cell {index}"
        for output in cell.outputs:
            is_meant = "raises-exception" in cell.metadata.get("tags", [])
            assert is_meant or output.output_type != "error", f"cell {index}"
            for place in ("/home/", "/Users/", "/root/", "/tmp/", str(ROOT)):
                assert place not in json.dumps(output), f"cell {index} shows {place}"


def test_prose_comes_first_and_cells_are_short(path):
    cells = read(path).cells
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.startswith("# ")
    sizes = {i: sum(map(bool, map(str.strip, c.source.splitlines()))) for i, c in code_cells(path)}
    assert not {i: n for i, n in sizes.items() if n > MAX_CELL_LINES}
    assert next(iter(sizes.values())) <= MAX_SETUP_LINES, "the setup cell"


def test_figures_have_alt_text_and_bars_start_at_zero(path):
    for index, cell in code_cells(path):
        for output in cell.outputs:
            data = output.get("data", {})
            assert "image/png" not in data, f"cell {index}: a plain image carries no alt text"
            for image in re.findall(r"<img\b[^>]*>", data.get("text/html", "")):
                alt = re.search(r'\balt="([^"]*)"', image)
                assert len(alt[1] if alt else "") >= MIN_ALT_CHARS, f"cell {index}: {image[:99]}"
        for node in ast.walk(ast.parse(python_of(cell))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("bars"):
                options = {one.arg: ast.unparse(one.value) for one in node.keywords}
                assert options.get("log", "False") == "False", f"cell {index}"


def test_one_choice_at_the_top_decides_on_which_device_the_page_runs(path):
    """A run without a device goes to GPUs where there are any, and meets tensors on the CPU."""
    (_, first), *others = code_cells(path)
    assert re.search('^DEVICE = "(auto|cpu)"  # ', first.source, re.MULTILINE)
    assert "labkit.warm_up(device=DEVICE" in first.source
    # On a GPU server it may say that ranks share a GPU.
    assert "nbval-ignore-output" in first.metadata.tags
    elsewhere = "\n".join(cell.source for _, cell in others)
    assert not re.findall(r'device="(?:auto|cuda\b[^"]*)"', elsewhere), "DEVICE decides"


def exercises(path):
    """The exercises: lists of cells, each from its heading to the next heading."""
    found = []
    for cell in read(path).cells:
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            found.append([])
        if found:
            found[-1].append(cell)
    return [cells for cells in found if cells[0].source.startswith("### Exercise")]


def test_every_exercise_has_the_same_form(path):
    for number, cells in enumerate(exercises(path), start=1):
        name = f"exercise {number}"
        title = TITLE.match(cells[0].source)
        assert title, f"{name}: title, then how hard it is, minutes and target in italics"
        assert int(title[1]) == number, f"{name} is called {title[1]}"
        kinds = [cell.cell_type for cell in cells]
        assert kinds == ["markdown", "code", "markdown", "code"], (
            f"{name}: question, stub, hints with the solution, check; found {kinds}"
        )
        _, stub, folds, check = (cell.source for cell in cells)
        assert STUB in stub, name
        assert re.search(r"\bcheck\.\w", check), f"{name}: the last cell checks"
        folds = FOLD.findall(folds)
        *hints, last = [title for title, _ in folds]
        if path.stem == ONE_HINT_OR_MORE:
            assert hints, f"{name}: no hint"
            assert all(title.startswith("Hint") for title in hints), f"{name}: {hints}"
        else:
            numbers = [title.split(":")[0] for title in hints]
            assert numbers == ["Hint 1", "Hint 2", "Hint 3"], f"{name}: {hints}"
        assert last == "Solution", f"{name}: {last}"
        (solution,) = re.findall(r"```python\n(.*?)```", folds[-1][1], re.DOTALL)
        ast.parse(solution)


def python_of(cell):
    """A cell's source without the lines that only IPython understands."""
    return "\n".join(line for line in cell.source.splitlines() if line.lstrip()[:1] not in "%!")


def bound_in(cell):
    """The names that a cell defines, imports or assigns; a loop's variable may come again."""
    for node in ast.parse(python_of(cell)).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign):
            targets = (one for target in node.targets for one in ast.walk(target))
            names = (one for one in targets if isinstance(one, ast.Name))
            yield from (one.id for one in names if isinstance(one.ctx, ast.Store))


def test_a_name_means_one_thing_so_that_a_page_can_be_run_in_any_order(path):
    cells = Counter(name for _, cell in code_cells(path) for name in {*bound_in(cell)})
    assert [name for name, count in cells.items() if count > 1] == []
