"""The tool behind make notebooks: what it stores, and what it refuses to store."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "execute_notebooks.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("execute_notebooks", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(tool, path, *sources, tags=()):
    v4 = tool.nbformat.v4
    cells = [v4.new_code_cell(source, metadata={"tags": list(tags)}) for source in sources]
    tool.nbformat.write(v4.new_notebook(cells=cells), path)
    return path


@pytest.mark.slow
def test_it_stores_outputs_and_running_again_changes_nothing(tool, tmp_path):
    path = write(
        tool, tmp_path / "a.ipynb", "import ipywidgets", "print(6 * 7)", "ipywidgets.HTML('x')"
    )
    assert tool.main([str(path)]) == 0
    first = path.read_bytes()
    cells = tool.nbformat.read(path, as_version=4).cells
    assert [cell.execution_count for cell in cells] == [1, 2, 3]
    assert cells[1].outputs[0].text == "42\n"
    assert cells[2].outputs[0].data == {"text/plain": "HTML(value='x')"}
    assert tool.main([str(path)]) == 0
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


def test_a_cell_that_raises_keeps_the_old_file(tool, tmp_path, capfd):
    path = write(tool, tmp_path / "a.ipynb", "print(1)", "1 / 0")
    before = path.read_bytes()
    assert tool.main([str(path)]) == 1
    assert path.read_bytes() == before
    assert "ZeroDivisionError" in capfd.readouterr().err


def test_a_cell_between_two_others_leaves_their_ids(tool):
    def ids(*sources):
        v4 = tool.nbformat.v4
        notebook = v4.new_notebook(cells=[v4.new_markdown_cell(source) for source in sources])
        tool.tidy(notebook)
        return [cell["id"] for cell in notebook.cells]

    first, last = ids("one", "three")
    assert ids("one", "two", "three") == [first, ids("two")[0], last]
    assert len(set(ids("same", "same"))) == 2


def test_what_changes_by_itself_is_left_out(tool):
    v4 = tool.nbformat.v4
    notebook = v4.new_notebook(cells=[v4.new_code_cell("1", metadata={"ExecuteTime": {}})])
    notebook.metadata.update(widgets={"state": {}}, language_info={"version": "3.11.2"})
    tool.tidy(notebook)
    assert "widgets" not in notebook.metadata
    assert notebook.metadata.language_info == {}
    assert notebook.cells[0].metadata == {}
