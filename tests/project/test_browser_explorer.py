"""The split explorer as a learner meets it: a picture whose cuts are dragged."""

import pytest

pytestmark = pytest.mark.browser

# A VGG16 whose costs are written down, not measured.
SETUP = """
from functools import partial

import labkit
import workbook
from labkit.costs import Link
from labkit.placement.planner import LayerCost, Profile
from labkit.training.measured import measure_split

layers = (LayerCost(f"layer {i}", 0.001, 0.002, 2**22 >> i // 2, 2**10, 2**10) for i in range(34))
profile, link = Profile("vgg16", 4, 2**20, tuple(layers)), Link(1e-4, 1e-9)
"""
SHOW = """
short = partial(measure_split, steps=2, device="cpu")
explorer = workbook.widgets.split_explorer(profile, link, split_points=(15,), measure=short)
explorer
"""
START = 15
WINDOW = {"width": 1280, "height": 800}
# From a key to the changed picture, in milliseconds, in the page: the quickest of 20 keys,
# as other tests may use the cores.
TIME_KEYS = """
handle => {
  const times = [...Array(20).keys()].map(i => {
    const before = handle.getAttribute('aria-valuenow');
    const start = performance.now();
    const key = i % 2 ? 'ArrowLeft' : 'ArrowRight';
    handle.dispatchEvent(new KeyboardEvent('keydown', {key, bubbles: true}));
    handle.getBoundingClientRect();
    const took = performance.now() - start;
    if (handle.getAttribute('aria-valuenow') === before) throw new Error('it did not move');
    return took;
  });
  return Math.min(...times);
}
"""

# How much lighter or darker text is than the page behind it: WCAG's contrast ratio.
CONTRAST = """
text => {
  const light = color => {
    const parts = color.match(/[0-9.]+/g).slice(0, 3).map(part => part / 255)
      .map(part => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
  };
  const style = getComputedStyle(text);
  let behind = text;
  while (behind && getComputedStyle(behind).backgroundColor === 'rgba(0, 0, 0, 0)') {
    behind = behind.parentElement;
  }
  const colors = [text instanceof SVGElement ? style.fill : style.color,
    getComputedStyle(behind).backgroundColor].map(light).sort((a, b) => a - b);
  return (colors[1] + 0.05) / (colors[0] + 0.05);
}
"""


@pytest.fixture(scope="module")
def page(lab):
    lab.add("explorer.ipynb", SETUP + SHOW, "explorer")
    page = lab.open("explorer.ipynb")
    page.run_all()
    yield page
    page.close()


class Picture:
    """The picture in a cell of the notebook."""

    def __init__(self, page, cell=0):
        self.page = page
        self.root = page.cell(cell).locator(".labkit-split")

    def cut(self, number):
        return self.root.get_by_role("slider", name=f"cut {number}")

    def choose(self, control, value):
        """Choose a radio button by its words."""
        group = self.root.get_by_role("radiogroup", name=control)
        group.get_by_role("radio", name=str(value), exact=True).check()

    def press(self, name):
        self.root.get_by_role("button", name=name).click()

    def drag(self, number, right_px):
        """Drag a handle with the mouse."""
        box = self.cut(number).locator(".grip").bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        mouse = self.page.window.mouse
        mouse.move(x, y)
        mouse.down()
        mouse.move(x + right_px / 2, y)
        mouse.move(x + right_px, y + 40, steps=3)
        mouse.up()

    def points(self):
        cuts = self.root.get_by_role("slider").all()
        return [int(cut.get_attribute("aria-valuenow")) for cut in cuts]

    def wait_for_points(self, *points):
        for number, point in enumerate(points, 1):
            selector = f'[aria-label="cut {number}"][aria-valuenow="{point}"]'
            self.root.locator(selector).wait_for(timeout=20_000)

    def wait_for_status(self, text, timeout_s=60):
        self.root.locator(".status", has_text=text).wait_for(timeout=timeout_s * 1000)

    def wait_for_number(self, name, text):
        number = self.root.locator(".numbers div", has_text=name)
        number.locator("dd", has_text=text).wait_for(timeout=20_000)

    def wait_for_measured_bars(self, some=True):
        bar = self.root.locator(".picture rect.measured").nth(6)
        bar.wait_for(state="attached" if some else "detached", timeout=20_000)


@pytest.fixture
def picture(page):
    made = Picture(page)
    page.window.set_viewport_size(WINDOW)
    made.cut(1).scroll_into_view_if_needed()
    made.choose("stages", 2)
    for key in ("Home", "PageUp", "PageUp", "PageUp", "ArrowLeft"):
        made.cut(1).press(key)
    assert made.points() == [START]
    return made


def test_a_cut_is_dragged_by_the_mouse_and_everything_follows(picture):
    picture.wait_for_number("all hops", "266 µs")
    edge = picture.root.locator(".picture").bounding_box()["width"] / 34
    picture.drag(1, -5 * edge)
    picture.wait_for_number("all hops", "724 µs")
    picture.wait_for_number("largest stage", "72 ms")
    picture.drag(1, 5 * edge)
    picture.wait_for_number("all hops", "266 µs")


def test_a_cut_follows_the_keyboard_and_says_where_it_is(picture):
    cut = picture.cut(1)
    assert cut.get_attribute("aria-valuetext") == "before layer 15, layer 15"
    for key, point in [("ArrowRight", 16), ("PageDown", 11), ("Home", 1), ("End", 33)]:
        cut.press(key)
        assert picture.points() == [point]
    cut.press("ArrowRight")
    assert picture.points() == [33]
    cut.press("Home")
    assert cut.evaluate(TIME_KEYS) < 50, "ms from the key to the new picture"
    assert picture.page.cell(0).evaluate("cell => cell.classList.contains('jp-mod-selected')")


def test_a_handle_pushes_the_others_and_they_come_back(picture):
    picture.choose("stages", 4)
    picture.wait_for_points(15, 24, 29)
    edge = picture.root.locator(".picture").bounding_box()["width"] / 34
    box = picture.cut(1).locator(".grip").bounding_box()
    mouse, y = picture.page.window.mouse, box["y"] + 5
    mouse.move(box["x"] + 13, y)
    mouse.down()
    mouse.move(box["x"] + 13 + 30 * edge, y)
    assert picture.points() == [31, 32, 33]
    mouse.move(box["x"] + 13 + edge, y)
    assert picture.points() == [16, 24, 29]
    mouse.up()
    mouse.move(box["x"] + 13 + 9 * edge, y)
    assert picture.points() == [16, 24, 29], "let go"


def test_run_lays_measured_bars_beside_and_they_stay(picture):
    picture.wait_for_measured_bars(False)
    picture.press("Run")
    picture.wait_for_status("measured, cut before layer 15")
    picture.wait_for_number("step", "measured ")
    for key, some in (("ArrowLeft", False), ("ArrowRight", True)):
        picture.cut(1).press(key)
        picture.wait_for_measured_bars(some)


def test_best_split_moves_the_handles_and_says_why(picture):
    picture.choose("stages", 3)
    picture.root.get_by_label("link between stages").select_option("1 GbE")
    picture.press("Best split")
    picture.wait_for_points(31, 33)
    picture.wait_for_status("best by the model, cut before layers 31, 33: step ")
    picture.root.get_by_label("link between stages").select_option("this machine")


@pytest.mark.parametrize("button", ["Stop", "Interrupt the kernel"])
def test_a_run_is_stopped_by_its_button_and_by_the_notebooks(picture, button):
    picture.cut(1).press("Home")
    picture.press("Run")
    picture.wait_for_status("measuring")
    picture.cut(1).press("ArrowRight")
    assert picture.points() == [2], "moves while the kernel is busy"
    picture.page.window.get_by_role("button", name=button).first.click()
    picture.wait_for_status("stopped")
    picture.wait_for_measured_bars(False)


def test_two_views_of_one_model_show_the_same(page, picture):
    other = Picture(page, cell=1)
    other.cut(1).scroll_into_view_if_needed()
    other.cut(1).press("End")
    assert other.points() == picture.points() == [33]
    other.choose("micro-batches", 4)
    assert picture.root.get_by_role("radio", name="4", exact=True).nth(2).is_checked()
    other.choose("micro-batches", 1)


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
@pytest.mark.parametrize("size", [(1280, 800), (900, 800)])
def test_it_is_legible_in_both_themes_and_fits(page, picture, theme, size):
    page.menu("Settings", "Theme", theme)
    page.window.locator(f'body[data-jp-theme-name="{theme}"]').wait_for(state="attached")
    page.window.set_viewport_size(dict(zip(("width", "height"), size)))
    picture.choose("stages", 4)
    assert picture.root.evaluate("root => root.scrollWidth <= root.clientWidth")
    assert picture.root.bounding_box()["height"] < 740
    texts = picture.root.locator("text, label span, dd, button")
    found = texts.evaluate_all(f"all => all.map(one => [one.textContent, ({CONTRAST})(one)])")
    assert len(found) > 30
    assert [(text, contrast) for text, contrast in found if contrast <= 4.5] == []


def test_its_state_stays_when_its_cell_is_run_again(page, picture):
    picture.cut(1).press("PageUp")
    picture.choose("layers by", "bytes")
    page.window.wait_for_timeout(300)
    page.cell(0).locator(".cm-content").click()
    page.window.keyboard.press("Control+Enter")
    picture.wait_for_points(20)
    assert picture.root.get_by_role("radio", name="bytes").is_checked()
    picture.choose("layers by", "compute")
