"""What a learner meets in a cell: errors, sources in the dark, pages that were just opened."""

import pytest
from browser import NOTEBOOK, ROOT

pytestmark = pytest.mark.browser

FAILS = """
import labkit, torch, workbook
def wrong_shape(comm):
    if comm.rank == 1:
        torch.nn.Linear(4, 2)(torch.ones(3))
    comm.barrier()
"""
SOURCE = "workbook.show_source(labkit.collectives.ring_all_reduce)"
TABLE = "workbook.predict_row('time of one all-reduce', 's', 1, 0.1, [0.1, 0.2, 0.3])"

# The contrast of each text in the output with what is behind it, by the formula of the Web
# Content Accessibility Guidelines 2.
CONTRASTS = """
output => {
  const canvas = document.createElement('canvas').getContext('2d', {willReadFrequently: true})
  const painted = (...colours) => {
    canvas.clearRect(0, 0, 1, 1)
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1) }
    return canvas.getImageData(0, 0, 1, 1).data
  }
  const luminance = colour => {
    const [red, green, blue] = [...colour].slice(0, 3).map(part => part / 255)
      .map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
  }
  const behind = node => {
    const found = []
    for (; node; node = node.parentElement) found.unshift(getComputedStyle(node).backgroundColor)
    return ['white', ...found]
  }
  const texts = [...output.querySelectorAll('pre, pre span')].filter(
    node => [...node.childNodes].some(child => child.nodeType == 3 && child.data.trim()))
  return texts.map(node => {
    const back = behind(node)
    const [one, other] = [
      luminance(painted(...back)), luminance(painted(...back, getComputedStyle(node).color))
    ].sort((a, b) => b - a)
    return [node.textContent.slice(0, 20), (one + 0.05) / (other + 0.05)]
  })
}
"""

# The lines that the text of each of a table's cells takes.
NUM_LINES = """
table => [...table.querySelectorAll('td')].map(cell => {
  const text = document.createRange()
  text.selectNodeContents(cell)
  const parts = [...text.getClientRects()].filter(part => part.width)
  return new Set(parts.map(part => Math.round(part.top))).size
})
"""


def test_errors_sources_and_tables_of_a_cell(lab):
    lab.add("cells.ipynb", FAILS, SOURCE, TABLE, "labkit.run(wrong_shape, world_size=2)")
    page = lab.open("cells.ipynb")
    page.run_all(timeout_s=120)
    check_error(page)
    for theme in ("JupyterLab Light", "JupyterLab Dark"):
        choose_theme(page, theme)
        found = page.cell(1).locator(".jp-RenderedHTML").evaluate(CONTRASTS)
        assert len(found) > 10
        weak = [(text, round(ratio, 2)) for text, ratio in found if ratio < 4.5]
        assert not weak, f"{theme}: {weak}"
    choose_theme(page, "JupyterLab Light")
    page.window.set_viewport_size({"width": 900, "height": 900})
    check_table(page)
    page.window.set_viewport_size({"width": 1280, "height": 1600})
    page.close()


def check_error(page):
    """Without the frames of libraries: the cell's line, the message, the rank's line."""
    text = page.cells()[3]["text"]
    assert len(text.strip().splitlines()) < 40
    assert "----> 1 labkit.run(wrong_shape, world_size=2)" in text
    assert "rank 1 raised RuntimeError" in text
    assert "Cell In[1], line 4" in text
    assert "torch.nn.Linear(4, 2)(torch.ones(3))" in text


def choose_theme(page, name):
    page.window.get_by_role("menuitem", name="Settings", exact=True).click()
    page.window.locator(".lm-Menu-itemLabel").get_by_text("Theme", exact=True).hover()
    page.window.locator(".lm-Menu-itemLabel").get_by_text(name, exact=True).click()
    light = "true" if name.endswith("Light") else "false"
    page.window.locator(f"body[data-jp-theme-light='{light}']").wait_for(state="attached")
    page.window.wait_for_timeout(500)


def check_table(page):
    """On a narrow page, no number breaks, and no column is outside of what can be scrolled to."""
    table = page.cell(2).locator("table")
    rows = table.evaluate("table => [...table.querySelectorAll('td')].map(td => td.innerText)")
    assert rows[2].splitlines() == ["200 ms", "(median of 3, from 100 ms to 300 ms)"]
    assert table.evaluate(NUM_LINES) == [1, 1, 2, 1, 1]
    wide, shown = table.evaluate("t => [t.scrollWidth, t.parentElement.scrollWidth]")
    assert wide <= shown


@pytest.mark.parametrize("name", ["00_start_here.ipynb", "08_layer_placement.ipynb"])
def test_opening_a_page_does_not_change_it(lab, name):
    page = lab.open(name)
    # The status bar says so once the kernel has answered; then its description is in the page.
    page.window.locator("#jp-main-statusbar", has_text="| Idle").wait_for(timeout=60_000)
    page.window.wait_for_timeout(2000)
    assert page.window.locator(".lm-TabBar-tab.jp-mod-dirty").count() == 0
    page.close()
    assert page.path.read_bytes() == (ROOT / "notebooks" / name).read_bytes()
    assert page.window.locator(NOTEBOOK).count() == 0
