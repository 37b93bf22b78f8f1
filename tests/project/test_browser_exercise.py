"""An exercise of page 06 as a learner works on it: a wrong answer, then the right one."""

import re

import nbformat
import pytest
from browser import ROOT

pytestmark = pytest.mark.browser

PAGE = ROOT / "notebooks" / "06_ring_all_reduce.ipynb"
# As in the solution, but every rank sends before it receives.
WRONG = """
def my_share_only(comm, chunks):
    P, rank = comm.world_size, comm.rank
    right, left = (rank + 1) % P, (rank - 1) % P
    for step in range(P - 1):
        comm.send(chunks[(rank + 1 - step) % P], right)
        comm.recv(chunks[(rank - step) % P], left)
"""


def exercise(title):
    """The page's setup, and of an exercise the stub, the cell that checks it, and the solution."""
    cells = nbformat.read(PAGE, as_version=4).cells
    code = [cell.source for cell in cells if cell.cell_type == "code"]
    start = next(i for i, cell in enumerate(cells) if cell.source.startswith(f"### {title}"))
    after = cells[start:]
    stub, check = [cell.source for cell in after if cell.cell_type == "code"][:2]
    fold = next(cell.source for cell in after if "<summary>Solution</summary>" in cell.source)
    solution = re.findall(r"```python\n(.*?)```", fold, re.DOTALL)[-1]
    return code[:2], [stub, check], solution


def test_a_wrong_answer_is_explained_and_the_right_one_is_drawn(lab):
    setup, cells, solution = exercise("Exercise 3: share-only")
    lab.add("exercise.ipynb", *setup, *cells)
    page = lab.open("exercise.ipynb")
    page.run_all()
    stub, check = len(setup), len(setup) + 1
    assert "not attempted yet: ring.share_only" in page.cells()[check]["text"]

    page.type_cell(stub, WRONG)
    page.run_all()
    said = page.cells()[check]["text"]
    assert "each waits for the next" in said
    assert "comm.send(chunks[(rank + 1 - step) % P], right)" in said
    assert "it did not finish" in page.cells()[check]["text"]

    page.type_cell(stub, solution)
    page.run_all()
    assert "passed: ring.share_only" in page.cells()[check]["text"]
    shown = page.cells()[check]["images"]
    assert len(shown) == 2, "the learner's timeline and labkit's"
    assert all("Timeline of 4 ranks" in image["alt"] for image in shown)
    told = page.cells()[check]["text"]
    assert "passed." in told
    assert not page.problems()
    page.close()
