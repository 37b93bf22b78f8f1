"""The notebooks as stored: executed, clean, and in the house style. Nothing is run here."""

import ast
import json
import re
import symtable
from collections import defaultdict
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MAX_CELL_LINES = 20
MAX_SETUP_LINES = 8
MIN_ALT_CHARS = 15
MIN_PROSE_SHARE = 0.5
# A learner writes before reading on: the first stub stands in this part of a page.
MAX_FIRST_STUB = 0.35
DETECTIVE = "13_detective_cases"  # so far with one case
MIN_EXERCISES, MIN_EXERCISES_ON, MIN_EXERCISES_IN_ALL = 4, {"00_start_here": 3, DETECTIVE: 1}, 45
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}

STUB = "raise NotImplementedError"
TITLE = re.compile(r"### Exercise (\d+): \S.*\n\n\*(Easy|Medium|Hard)[^*]*\b\d+ minutes\b[^*]*\*")
FOLD = re.compile(r"<details><summary>(.*?)</summary>(.*?)</details>", re.DOTALL)


def pytest_generate_tests(metafunc):
    if "path" in metafunc.fixturenames:
        metafunc.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


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


# What the learner writes


def exercises(path):
    """The exercises: lists of cells, each from its heading to the next heading."""
    found = []
    for cell in read(path).cells:
        if cell.cell_type == "markdown" and cell.source.startswith("### Exercise"):
            found.append([cell])
        elif cell.cell_type == "markdown" and cell.source.startswith("#"):
            found.append([])
        elif found:
            found[-1].append(cell)
    return [cells for cells in found if cells and cells[0].source.startswith("### Exercise")]


def test_the_learner_writes_early(path):
    cells = read(path).cells
    is_stub = [cell.cell_type == "code" and STUB in cell.source for cell in cells]
    assert any(is_stub)
    first = is_stub.index(True)
    # (A case is looked at before it is solved.)
    assert path.stem == DETECTIVE or first <= MAX_FIRST_STUB * len(cells), (
        f"the first stub is cell {first} of {len(cells)}"
    )


def test_a_page_has_enough_exercises(path):
    least = MIN_EXERCISES_ON.get(path.stem, MIN_EXERCISES)
    assert len(exercises(path)) >= least


def test_the_course_has_enough_exercises():
    assert sum(len(exercises(path)) for path in NOTEBOOKS) >= MIN_EXERCISES_IN_ALL


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
        _hints_then_one_solution(name, folds)


def _hints_then_one_solution(name, text):
    folds = FOLD.findall(text)
    *hints, last = [title for title, _ in folds]
    assert hints, f"{name}: no hint"
    assert all(title.startswith("Hint") for title in hints), f"{name}: {hints}"
    assert last == "Solution", f"{name}: {last}"
    blocks = re.findall(r"```python\n(.*?)```", folds[-1][1], re.DOTALL)
    assert len(blocks) == 1, f"{name}: {len(blocks)} blocks of Python in the solution"
    ast.parse(blocks[0])


def test_predictions_are_made_in_their_field(path):
    for index, cell in code_cells(path):
        by_hand = re.search(r"^\w*predict\w*\s*=\s*(None|\.\.\.)", cell.source, re.MULTILINE)
        assert not by_hand, f"cell {index}: {by_hand[0]}; use workbook.predict"


def test_no_bar_stands_on_a_logarithmic_axis(path):
    for index, cell in code_cells(path):
        for node in ast.walk(tree_of(cell)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("bars"):
                options = {one.arg: ast.unparse(one.value) for one in node.keywords}
                assert options.get("log", "False") == "False", f"cell {index}"


# Names: a page can be run in any order


def tree_of(cell):
    return ast.parse(python_of(cell))


def python_of(cell):
    """A cell's source without the lines that only IPython understands."""
    return "\n".join(line for line in cell.source.splitlines() if line.lstrip()[:1] not in "%!")


def bound(node, by_loop=False):
    """(name, whether by a loop) for each name that a module-level statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name, False
        return
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield alias.asname or alias.name.partition(".")[0], False
        return
    if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
        yield node.id, by_loop
    if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
        named = (inner for inner in ast.walk(node) if isinstance(inner, ast.NamedExpr))
        yield from ((inner.target.id, False) for inner in named)
        return
    for field, value in ast.iter_fields(node):
        of_loop = by_loop or (isinstance(node, ast.For) and field == "target")
        of_loop = of_loop or (isinstance(node, ast.withitem) and field == "optional_vars")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from bound(child, of_loop)


def reads(table, inside=False):
    """The module-level names that a cell reads, also inside its functions."""
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (not inside or symbol.is_global()):
            yield symbol.get_name()
    for child in table.get_children():
        yield from reads(child, inside=True)


def names_of_two_things(cells):
    """Name -> the cells that bind it, for names that mean different things in different cells.

    Args:
        cells: (index, source) of the code cells.

    A loop's variable may come again, if each cell that reads the name also binds it.
    """
    by_name, loops, readers = defaultdict(set), defaultdict(list), defaultdict(set)
    for index, source in cells:
        for name, by_loop in bound(ast.parse(source)):
            by_name[name].add(index)
            loops[name].append(by_loop)
        for name in reads(symtable.symtable(source, f"cell {index}", "exec")):
            readers[name].add(index)
    return {
        name: sorted(places)
        for name, places in by_name.items()
        if len(places) > 1 and not (all(loops[name]) and readers[name] <= places)
    }


def test_a_name_means_one_thing_on_a_page(path):
    cells = [(index, python_of(cell)) for index, cell in code_cells(path)]
    assert names_of_two_things(cells) == {}


def test_names_are_found_wherever_they_are_bound():
    once = [(0, "import a.b\nfrom c import d as e\ndef f(x): y = x"), (1, "g = [x for x in e]")]
    assert names_of_two_things(once) == {}
    again = [(2, "a = 1"), (3, "e, *g = 1, 2"), (4, "class f: pass"), (5, "g += 1")]
    assert names_of_two_things(once + again) == {
        "a": [0, 2],
        "e": [0, 3],
        "f": [0, 4],
        "g": [1, 3, 5],
    }
    inside = [(0, "if True:\n    a = 1"), (1, "try:\n    a: int = 2\nfinally:\n    pass")]
    assert names_of_two_things(inside) == {"a": [0, 1]}
    walrus = [(0, "print(a := 1)"), (1, "[a := x for x in (1, 2)]")]
    assert names_of_two_things(walrus) == {"a": [0, 1]}


def test_a_loop_s_variable_may_come_again_where_no_other_cell_reads_it():
    loops = [(0, "for i, j in x:\n    print(i)"), (1, "for i in x:\n    f(lambda: i)")]
    assert names_of_two_things(loops) == {}
    assert names_of_two_things([*loops, (2, "print(i)")]) == {"i": [0, 1]}
    assert names_of_two_things([*loops, (2, "def g():\n    return i")]) == {"i": [0, 1]}
    assert names_of_two_things([*loops, (2, "def g(i):\n    return i")]) == {}
    assert names_of_two_things([*loops, (2, "i = 1")]) == {"i": [0, 1, 2]}
