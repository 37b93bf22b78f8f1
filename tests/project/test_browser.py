"""The workbook as a learner meets it, JupyterLab in a browser. That all pages run, nbval shows."""

import re

import nbformat
import pytest
from browser import ROOT

pytestmark = pytest.mark.browser


# As in the solution, but every rank sends before it receives.
WRONG = """
def my_share_only(comm, chunks):
    P, rank = comm.world_size, comm.rank
    right, left = (rank + 1) % P, (rank - 1) % P
    for step in range(P - 1):
        comm.send(chunks[(rank + 1 - step) % P], right)
        comm.recv(chunks[(rank - step) % P], left)
"""


def test_a_wrong_answer_is_explained_and_the_right_one_is_drawn(lab):
    cells = nbformat.read(ROOT / "notebooks" / "06_ring_all_reduce.ipynb", as_version=4).cells
    title = r"### Exercise \d+: share-only"
    start = next(i for i, cell in enumerate(cells) if re.match(title, cell.source))
    sources = [cell.source for cell in cells if cell.cell_type == "code"][:2]
    sources += [cell.source for cell in cells[start:] if cell.cell_type == "code"][:2]
    fold = next(c.source for c in cells[start:] if "<summary>Solution</summary>" in c.source)
    lab.add("exercise.ipynb", *sources)
    page = lab.open("exercise.ipynb")
    page.run_all()
    assert "not attempted yet: ring.share_only" in page.cells()[3]["text"]

    page.type_cell(2, WRONG)
    page.run_all()
    said = page.cells()[3]["text"]
    assert "each waits for the next" in said
    assert "comm.send(chunks[(rank + 1 - step) % P], right)" in said

    page.type_cell(2, re.findall(r"```python\n(.*?)```", fold, re.DOTALL)[-1])
    page.run_all()
    shown = page.cells()[3]
    assert "passed: ring.share_only" in shown["text"]
    assert len(shown["images"]) == 2, "the learner's timeline and labkit's"
    assert all("Timeline of 4 ranks" in image["alt"] for image in shown["images"])
    assert not page.problems()
    page.close()


# A VGG16 whose costs are written down, not measured.
EXPLORER = """
from functools import partial
import labkit, workbook
from labkit.costs import Link
from labkit.costs.planner import LayerCost, Profile
from labkit.training.measured import measure_split

layers = (LayerCost(f"layer {i}", 0.001, 0.002, 2**22 >> i // 2, 2**10, 2**10) for i in range(34))
profile, link = Profile("vgg16", 4, 2**20, tuple(layers)), Link(1e-4, 1e-9)
short = partial(measure_split, steps=2, device="cpu")
workbook.widgets.split_explorer(profile, link, split_points=(15,), measure=short)
"""


def test_the_split_explorer_follows_mouse_and_keys_and_measures_what_is_chosen(lab):
    lab.add("explorer.ipynb", EXPLORER)
    page = lab.open("explorer.ipynb")
    page.run_all()
    root = page.cell(0)
    cut = root.get_by_role("slider", name="cut 1")
    root.get_by_role("cell", name="266 µs", exact=True).wait_for()
    box = cut.locator(".grip").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.window.mouse.move(x, y)
    page.window.mouse.down()
    edge = root.locator(".picture").bounding_box()["width"] / 34
    page.window.mouse.move(x - 5 * edge, y + 40, steps=3)
    page.window.mouse.up()
    root.get_by_role("cell", name="724 µs", exact=True).wait_for()
    for key, point in (("PageUp", "15"), ("End", "33"), ("ArrowRight", "33"), ("Home", "1")):
        cut.press(key)
        assert cut.get_attribute("aria-valuenow") == point
    root.get_by_role("button", name="Run").click()
    root.get_by_text("measuring ...").wait_for()
    cut.press("ArrowRight")
    assert cut.get_attribute("aria-valuenow") == "2", "moves while the kernel is busy"
    root.get_by_text("measured, cut before layer 1").wait_for(timeout=60_000)
    cut.press("ArrowLeft")
    root.locator(".picture rect.measured").first.wait_for()
    assert root.locator(".picture rect.measured").count() > 6
    assert not page.problems()
    page.close()


LIVE = """
import time, torch, labkit, workbook
def work(comm, steps):
    for step in range(steps):
        with comm.span("compute"):
            time.sleep(0.05 + 0.02 * comm.rank)
        labkit.collectives.ring_all_reduce(comm, torch.ones(1000))
        comm.progress(step + 1, steps, "steps", samples=8, loss=1 / (step + 1))
"""
LANES = 'svg[aria-label^="Live timeline of 2 ranks"]'


def test_lanes_fill_while_ranks_run_end_as_the_timeline_and_stop_at_the_button(lab):
    runs = [f"labkit.run(work, {steps}, world_size=2).values" for steps in (40, 4000)]
    lab.add("live.ipynb", LIVE, *runs)
    page = lab.open("live.ipynb")
    page.start_all()
    page.cell(1).locator('img[alt*="Timeline of 2 ranks"]').wait_for(timeout=60_000)
    assert page.cell(1).locator(LANES).count() == 0
    lanes = page.cell(2).locator(LANES)
    lanes.wait_for(timeout=20_000)
    early = lanes.inner_html()
    changed = "([lanes, early]) => document.querySelector(lanes).innerHTML != early"
    page.window.wait_for_function(changed, arg=[LANES, early])
    words = lanes.text_content()
    assert all(part in words for part in ("rank 1", "loss", "samples/s", "of 4,000 steps"))
    page.window.get_by_role("button", name="Interrupt the kernel").first.click()
    page.finish()
    assert "KeyboardInterrupt" in page.cells()[2]["text"]
    assert "stopped" in lanes.text_content()
    page.close()


def test_enter_in_a_prediction_goes_on_to_the_next_cell(lab):
    cells = 'import workbook\nmine = workbook.predict("time", "s")', "print(mine.value)"
    lab.add("prediction.ipynb", *cells)
    page = lab.open("prediction.ipynb")
    page.run_all()
    field = page.cell(0).get_by_role("textbox", name="Your prediction of time (s)")
    field.fill("15 ms")
    field.press("Enter")
    page.cell(0).get_by_text("Your prediction: 15 ms").wait_for()
    page.window.keyboard.press("Shift+Enter")
    page.cell(1).get_by_text("0.015").wait_for()
    assert not page.problems()
    page.close()
