"""The workbook as a learner meets it: JupyterLab in a browser, with pages run from top to end.

Screenshots of the notebooks that run here are left in build/screenshots.
"""

import pytest
from browser import ROOT

pytestmark = pytest.mark.browser

NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))

SLIDER = """
import ipywidgets as widgets

slider = widgets.IntSlider(1, 1, 9)
view = widgets.HTML("one")
slider.observe(lambda change: setattr(view, "value", f"moved to {change['new']}"), "value")
widgets.VBox([slider, view])
"""


STEPPER = "import labkit\nlabkit.widgets.ring_stepper(world_size=4)"


def move_the_ring_stepper(page):
    page.move_slider(0, "ArrowRight")
    page.wait_for_text("Step 1 of 6, share_reduce: rank 0 sends chunk 0 to rank 1")


def move_the_bucket_explorer(page):
    page.move_slider(0, "Home")
    page.wait_for_text("Model: buckets of one parameter make 240 all-reduces")


def move_the_staleness_explorer(page):
    page.move_slider(1, "Home")
    page.wait_for_text("53 gradients are applied while synchronous rounds apply 45")
    page.move_slider(0, "End")
    page.wait_for_text("104 gradients are applied while synchronous rounds apply 72")


def drive_the_split_explorer(page):
    """Slider 0 has the number of stages, slider 1 the first cut."""
    page.move_slider(1, "ArrowRight")
    moved = shown_split(page, "cut before layer 16, batch of 4")
    assert "Measured" not in moved["alt"]
    page.press_button("Run")
    page.wait_for_text("measured, cut before layer 16", timeout_s=60)
    measured = shown_split(page, "cut before layer 16, batch of 4. Predicted", "Measured step")
    assert measured["source"] != moved["source"]
    page.move_slider(0, "ArrowRight")
    page.press_button("Best split")
    page.wait_for_text("best by the model: cut before layers 31, 32")
    assert "Measured" not in shown_split(page, "vgg16 in 3 stages", "31, 32, batch of 4")["alt"]


def shown_split(page, *words):
    """The explorer's picture, once its words for readers who do not see it are these."""
    selector = "".join(f'[alt*="{part}"]' for part in words)
    picture = page.page.locator(f".widget-html img{selector}")
    picture.wait_for(timeout=20_000)
    return picture.evaluate("one => ({source: one.src, alt: one.alt})")


# By notebook, what to do with its sliders once it has run.
MOVES = {
    "03_distributed_data_parallel.ipynb": move_the_bucket_explorer,
    "05_async_parameter_server.ipynb": move_the_staleness_explorer,
    "06_ring_all_reduce.ipynb": move_the_ring_stepper,
    "08_layer_placement.ipynb": drive_the_split_explorer,
}


# nbval runs every page. Run here, too, are the first one and those whose sliders need a kernel.
RUN = ["00_start_here.ipynb", *MOVES]


@pytest.mark.parametrize("name", RUN)
def test_a_notebook_runs_from_top_to_end(lab, name):
    page = lab.open(name)
    page.run_all()
    page.save_screenshots()
    assert not page.problems()
    if name in MOVES:
        MOVES[name](page)
        assert not page.problems()
    page.close()


@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if name not in RUN])
def test_a_notebook_shows_what_is_stored(lab, name):
    page = lab.open(name)
    assert any(cell["images"] for cell in page.cells())
    assert not page.problems()
    page.close()


def test_a_slider_reaches_the_kernel_and_comes_back(lab):
    lab.add("slider.ipynb", SLIDER)
    page = lab.open("slider.ipynb")
    page.run_all(timeout_s=60)
    page.move_slider(0, "ArrowRight", "ArrowRight")
    page.wait_for_text("moved to 3")
    assert not page.problems()
    page.close()


def test_the_ring_stepper_follows_the_keyboard(lab):
    lab.add("stepper.ipynb", STEPPER)
    page = lab.open("stepper.ipynb")
    page.run_all(timeout_s=60)
    start = page.images(0)
    page.move_slider(0, "ArrowRight", "ArrowRight")
    page.wait_for_text("Step 2 of 6, share_reduce: rank 0 sends chunk 3 to rank 1")
    assert "step 2 of 6" in page.images(0)[0]["alt"]
    assert page.images(0)[0]["source"] != start[0]["source"]
    page.move_slider(0, "End", "ArrowRight")  # there is no step after the last
    page.wait_for_text("Step 6 of 6, share_only")
    page.move_slider(1, "Home")
    page.wait_for_text("Step 2 of 2, share_only")
    page.move_slider(1, *["ArrowRight"] * 4)
    page.wait_for_text("Step 2 of 10")  # until then the page knows of two steps only
    page.move_slider(0, *["ArrowRight"] * 8)
    page.wait_for_text("Every rank now owns the complete sums of all 6 chunks")
    assert [image["alt"][:30] for image in page.images(0)] == ["Ring all-reduce of 6 ranks, st"]
    page.save_screenshots()
    assert not page.problems()
    page.close()


def test_a_slider_moved_while_a_cell_runs_ends_at_its_last_value(lab):
    lab.add("busy.ipynb", STEPPER, "import time\ntime.sleep(3)")
    page = lab.open("busy.ipynb")
    page.menu("Run", "Run All Cells")
    page.move_slider(0, *["ArrowRight"] * 5)
    page.wait_for_text("Step 5 of 6")
    page.close()


def test_a_cell_that_raises_is_a_problem_unless_it_is_meant_to(lab):
    lab.add("raises.ipynb", "1 / 0", "[][5]", "'never run'", raises=(0,))
    page = lab.open("raises.ipynb")
    page.run_all(timeout_s=60)
    raised = "cell 1: IndexError: list index out of range"
    assert page.problems() == [raised, "cell 2: never ran"]
    page.close()
