"""The workbook as a learner meets it, JupyterLab in a browser. That all pages run, nbval shows.

With --screenshots, pictures of the pages are left in build/screenshots.
"""

import json

import pytest
from browser import ROOT

pytestmark = pytest.mark.browser

NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))

# For the pages' own explorers: a VGG16 whose costs are written down, not measured.
SETUP = """
from functools import partial

import labkit
import workbook
from labkit.costs import Link
from labkit.placement.planner import LayerCost, Profile
from labkit.training.measured import measure_split

DEVICE = "cpu"
layers = (LayerCost(f"layer {i}", 0.001, 0.002, 2**22 >> i // 2, 2**10, 2**10) for i in range(34))
profile, link = Profile("vgg16", 4, 2**20, tuple(layers)), Link(1e-4, 1e-9)
"""


def widget_of(name):
    """The cell of a page that shows a widget."""
    cells = json.loads((ROOT / "notebooks" / name).read_text())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (source,) = (source for source in code if "workbook.widgets." in source)
    return source


def test_the_first_page_runs_from_top_to_end(lab):
    page = lab.open("00_start_here.ipynb")
    page.run_all()
    assert not page.problems()
    page.close()


@pytest.mark.parametrize("name", NOTEBOOKS[1:])
def test_a_page_shows_what_is_stored(lab, name):
    page = lab.open(name)
    stored = "<img " in (ROOT / "notebooks" / name).read_text()
    assert any(cell["images"] for cell in page.cells()) == stored
    assert not page.problems()
    page.close()


def test_the_widgets_follow_the_keyboard_even_while_a_cell_runs(lab):
    pages = [
        "03_distributed_data_parallel.ipynb",
        "05_async_parameter_server.ipynb",
        "06_ring_all_reduce.ipynb",
        "08_layer_placement.ipynb",
    ]
    lab.add("widgets.ipynb", SETUP, *map(widget_of, pages), "import time\ntime.sleep(3)")
    page = lab.open("widgets.ipynb")
    page.start_all()
    buckets, staleness, stepper, splits = 1, 2, 3, 4
    start = page.wait_for_image(stepper, "Ring all-reduce of 4 ranks")
    page.move_slider(stepper, 0, *["ArrowRight"] * 5)
    page.finish()
    drive_the_stepper(page, stepper, start)
    page.move_slider(buckets, 0, "Home")
    page.wait_for_text("Model: buckets of one parameter make 240 all-reduces")
    page.move_slider(staleness, 1, "Home")
    page.wait_for_text("53 gradients are applied while synchronous rounds apply 45")
    page.move_slider(staleness, 0, "End")
    page.wait_for_text("104 gradients are applied while synchronous rounds apply 72")
    drive_the_split_explorer(page, splits)
    assert not page.problems()
    page.close()


def drive_the_stepper(page, cell, start):
    """Slider 0 has the step, slider 1 the number of ranks; five steps were taken."""
    page.wait_for_text("Step 5 of 6")
    page.move_slider(cell, 0, *["ArrowLeft"] * 3)
    page.wait_for_text("Step 2 of 6, share_reduce: rank 0 sends chunk 3 to rank 1")
    assert page.wait_for_image(cell, "step 2 of 6")["source"] != start["source"]
    page.move_slider(cell, 0, "End", "ArrowRight")  # there is no step after the last
    page.wait_for_text("Step 6 of 6, share_only")
    page.move_slider(cell, 1, "Home")
    page.wait_for_text("Step 2 of 2, share_only")
    page.move_slider(cell, 1, *["ArrowRight"] * 4)
    page.wait_for_text("Step 2 of 10")  # until then the page knows of two steps only
    page.move_slider(cell, 0, *["ArrowRight"] * 8)
    page.wait_for_text("Step 10 of 10, share_only")
    page.wait_for_image(cell, "36 of 36")


def drive_the_split_explorer(page, cell):
    """tests/project/test_browser_explorer.py does more with it."""
    cut = page.cell(cell).get_by_role("slider", name="cut 1")
    cut.press("ArrowRight")
    assert cut.get_attribute("aria-valuenow") == "16"
    page.cell(cell).get_by_role("button", name="Run").press("Enter")
    page.wait_for_text("measured, cut before layer 16", timeout_s=60)


def test_a_cell_that_raises_is_a_problem_unless_it_is_meant_to(lab):
    lab.add("raises.ipynb", "1 / 0", "[][5]", "'never run'", raises=(0,))
    page = lab.open("raises.ipynb")
    page.run_all(timeout_s=60)
    raised = "cell 1: IndexError: list index out of range"
    assert page.problems() == [raised, "cell 2: never ran"]
    page.close()
