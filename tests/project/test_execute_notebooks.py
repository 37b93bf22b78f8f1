"""The tool behind make notebooks: what it stores, and what it refuses to store."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
import execute_notebooks as tool


def write(path, *sources, tags=()):
    v4 = tool.nbformat.v4
    cells = [v4.new_code_cell(source, metadata={"tags": list(tags)}) for source in sources]
    tool.nbformat.write(v4.new_notebook(cells=cells), path)
    return path


@pytest.mark.slow
def test_it_stores_outputs_and_running_again_changes_nothing(tmp_path):
    path = write(tmp_path / "a.ipynb", "import ipywidgets", "print(6 * 7)", "ipywidgets.HTML('x')")
    assert tool.main([str(path)]) == 0
    first = path.read_bytes()
    cells = tool.nbformat.read(path, as_version=4).cells
    assert [cell.execution_count for cell in cells] == [1, 2, 3]
    assert cells[1].outputs[0].text == "42\n"
    assert cells[2].outputs[0].data == {"text/plain": "HTML(value='x')"}
    assert tool.main([str(path)]) == 0
    assert path.read_bytes() == first
    assert list(tmp_path.iterdir()) == [path]


def test_a_cell_that_raises_keeps_the_old_file(tmp_path, capfd):
    path = write(tmp_path / "a.ipynb", "print(1)", "1 / 0")
    before = path.read_bytes()
    assert tool.main([str(path)]) == 1
    assert path.read_bytes() == before
    assert "ZeroDivisionError" in capfd.readouterr().err
