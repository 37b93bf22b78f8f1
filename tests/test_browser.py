"""The workbook as a learner meets it: JupyterLab in a browser, every notebook run from top to end.

Screenshots of each notebook are left in build/screenshots.
"""

import pytest
from browser import ROOT
from nbformat.v4 import new_code_cell

pytestmark = pytest.mark.browser

NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))

SLIDER = """
import ipywidgets as widgets

slider = widgets.IntSlider(1, 1, 9)
view = widgets.HTML("one")
slider.observe(lambda change: setattr(view, "value", f"moved to {change['new']}"), "value")
widgets.VBox([slider, view])
"""


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_from_top_to_end(lab, name):
    page = lab.open(name)
    page.run_all()
    page.save_screenshots()
    assert not page.problems()
    page.close()


def test_a_slider_reaches_the_kernel_and_comes_back(lab):
    lab.add("slider.ipynb", [new_code_cell(SLIDER)])
    page = lab.open("slider.ipynb")
    page.run_all(timeout_s=60)
    page.move_slider(0, "ArrowRight", "ArrowRight")
    page.wait_for_text("moved to 3")
    assert not page.problems()
    page.close()


def test_a_cell_that_raises_is_a_problem_unless_it_is_meant_to(lab):
    expected = new_code_cell("1 / 0", metadata={"tags": ["raises-exception"]})
    cells = [expected, new_code_cell("[][5]"), new_code_cell("'never run'")]
    lab.add("raises.ipynb", cells)
    page = lab.open("raises.ipynb")
    page.run_all(timeout_s=60)
    raised = "cell 1: IndexError: list index out of range"
    assert page.problems() == [raised, "cell 2: never ran"]
    page.close()
