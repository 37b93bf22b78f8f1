"""JupyterLab in headless Chromium, for tests: open a notebook, run it, read it, move its sliders.

A test takes the fixture ``lab`` of conftest.py, a `Lab`::

    def test_the_stepper_shows_the_next_step(lab):
        page = lab.open("06_ring_all_reduce.ipynb")
        page.run_all()
        page.move_slider(23, 0, "ArrowRight")
        page.wait_for_text("step 1")
        assert not page.problems()
        page.close()

Sliders are numbered within their cell, from 0.
"""

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_ports
import warm_python

ROOT = Path(__file__).resolve().parents[1]
SCREENSHOTS = ROOT / "build" / "screenshots"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM_OPTIONS = [
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
SERVER_OPTIONS = [
    "--no-browser",
    "--ServerApp.ip=127.0.0.1",
    # If the tests are killed before they can end the server, it ends by itself.
    "--ServerApp.shutdown_no_activity_timeout=300",
    "--MappingKernelManager.cull_idle_timeout=300",
    "--MappingKernelManager.cull_interval=30",
]
WINDOW = {"width": 1280, "height": 1600}
MAX_SLICES = 40
POLL_MS = 500
PROGRESS = "progress.json"
LAUNCH = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
import kernel_ports
kernel_ports.install()
from workbook.lab import main
sys.exit(main(sys.argv[1:]))
"""
# All cells are in the page at the same time: by default, JupyterLab leaves out those that are out
# of sight. A tab that is closed ends its kernel without asking.
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": '{"windowingMode": "none", "kernelShutdown": true}'
}

NOTEBOOK = ".jp-NotebookPanel:not(.lm-mod-hidden)"
# A cheap query, since it is repeated while the notebook runs.
READ_PROMPTS = """
notebook => [...document.querySelectorAll(notebook + ' .jp-InputPrompt')]
  .map(prompt => prompt.textContent).join(' ')
"""
# One entry per cell, in the order of the notebook.
READ_CELLS = """
notebook => [...document.querySelectorAll(notebook + ' .jp-Notebook .jp-Cell')].map(cell => ({
  prompt: cell.querySelector('.jp-InputPrompt')?.innerText ?? '',
  images: [...cell.querySelectorAll('img')]
    .map(image => ({alt: image.alt, width: image.complete ? image.naturalWidth : 0})),
  text: cell.querySelector('.jp-Cell-outputWrapper')?.innerText ?? '',
}))
"""
# Whether the notebook in front has this number of cells, all of them rendered.
HAS_CELLS = """
([notebook, number]) =>
  document.querySelectorAll(notebook + ' .jp-Notebook .jp-Cell').length == number
  && [...document.images].every(image => image.complete)
"""
# Whether the prompt of the cell with this index has another number than before.
HAS_RUN = r"""
([notebook, index, before]) => {
  const cell = document.querySelectorAll(notebook + ' .jp-Notebook .jp-Cell')[index];
  const prompt = cell.querySelector('.jp-InputPrompt').innerText;
  return /\d/.test(prompt) && prompt != before;
}
"""
HAS_IMAGES = "() => [...document.images].every(image => image.complete)"
IS_CLOSED_OR_ASKS = """
notebook => !document.querySelector(notebook) || document.querySelector('.jp-Dialog')
"""


def chromium() -> str | None:
    """The path of this machine's Chromium or Chrome, or None."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), None)


def missing() -> str:
    """What this machine lacks for the browser tests; empty if nothing."""
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed: make env"
    if chromium() is None:
        return f"no Chromium here (looked for {', '.join(BROWSERS)}): sudo apt install chromium"
    return ""


@contextlib.contextmanager
def open_lab(folder: Path, screenshots: bool = False) -> Iterator["Lab"]:
    """Serve a copy of the notebooks with `labkit lab`, open a browser, and end both at the end.

    Its kernels are forks of a Python that has imported torch, see ``warm_python``.
    With ``screenshots`` every page is kept as pictures before it is closed.
    """
    from playwright.sync_api import sync_playwright

    workbook = folder / "workbook"
    _copy_notebooks(workbook / "notebooks")
    warm_python.write_kernel(folder / "jupyter")
    kernels = {"JUPYTER_PATH": str(folder / "jupyter")}
    with serve(folder, workbook, **kernels) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=CHROMIUM_OPTIONS)
        try:
            yield Lab(browser, address, workbook / "notebooks", screenshots)
        finally:
            browser.close()


def _copy_notebooks(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(path, folder)


class SharedLab:
    """One `Lab` for the modules of browser tests that follow each other: it takes 10 s to start.

    It is closed before any other test: while Playwright is open its event loop occupies the main
    thread, which the kernels of other tests need.
    """

    def __init__(self) -> None:
        self._opened = contextlib.ExitStack()
        self._lab: Lab | None = None

    def at_its_start(self, folder: Path, screenshots: bool) -> "Lab":
        """The lab as it is after it was opened; in ``folder``, if it is not open yet."""
        if self._lab is None:
            self._lab = self._opened.enter_context(open_lab(folder, screenshots))
        else:
            self._lab.reset()
        return self._lab

    def close(self) -> None:
        self._lab = None
        self._opened.close()


@contextlib.contextmanager
def empty_page() -> Iterator[Any]:
    """Playwright's page with nothing in it, in a browser without JupyterLab."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=CHROMIUM_OPTIONS)
        try:
            yield browser.new_page()
        finally:
            browser.close()


@contextlib.contextmanager
def serve(folder: Path, workbook: Path, **variables: str) -> Iterator[str]:
    """Run `labkit lab` in the workbook; yields its address, ends it by one interrupt."""
    token = secrets.token_hex(16)
    log = folder / "jupyterlab.log"
    options = [*SERVER_OPTIONS, f"--ServerApp.port={kernel_ports.free_port()}"]
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *options],
            cwd=workbook,
            env=_environment(folder, token) | variables,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield _wait_for_address(process, log)
    finally:
        _end(process)


def _environment(folder: Path, token: str) -> dict[str, str]:
    # As in a learner's shell: with PYTEST_CURRENT_TEST, kernels treat child processes differently.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "LABKIT_"))}
    for name in ("CONFIG", "DATA", "RUNTIME"):
        env[f"JUPYTER_{name}_DIR"] = str(folder / name.lower())
    env["JUPYTERLAB_WORKSPACES_DIR"] = str(folder / "workspaces")
    env["JUPYTERLAB_SETTINGS_DIR"] = str(folder / "settings")
    env["JUPYTER_TOKEN"] = token
    # Not the progress of the person who runs the tests.
    env["LABKIT_PROGRESS"] = str(folder / PROGRESS)
    for plugin, text in SETTINGS.items():
        path = folder / "settings" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return env


def _wait_for_address(process: subprocess.Popen, log: Path, limit_s: float = 60.0) -> str:
    deadline_s = time.monotonic() + limit_s
    while time.monotonic() < deadline_s and process.poll() is None:
        found = re.search(r"(http://\S+?)/lab\S*", log.read_text())
        if found:
            return found[0]
        time.sleep(0.1)
    raise AssertionError(f"JupyterLab did not start within {limit_s:g} s:\n{log.read_text()}")


def _end(process: subprocess.Popen, limit_s: float = 15.0) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


class Lab:
    """One JupyterLab in one browser window. ``notebooks`` is the served copy: tests may add to it.

    Notebooks are opened as tabs of that window, one at a time, since loading JupyterLab takes
    seconds.
    """

    def __init__(self, browser, address: str, notebooks: Path, screenshots: bool):
        self.notebooks = notebooks
        self._screenshots = screenshots
        self._window = browser.new_page(viewport=WINDOW)
        base, query = address.split("/lab", 1)
        token = query.partition("token=")[2]
        # Not the page that opens first for learners: a test opens that one.
        self._address = f"{base}/lab/tree/notebooks?token={token}&reset"
        self._window.goto(self._address)

    def reset(self) -> None:
        """Forget what earlier tests did: their notebooks and progress, and their window."""
        _copy_notebooks(self.notebooks)
        (self.notebooks.parents[1] / PROGRESS).unlink(missing_ok=True)
        self._window.set_viewport_size(WINDOW)
        is_light = self._window.locator("body[data-jp-theme-light='true']").count()
        # A test that failed may have left a tab open.
        if not is_light or self._window.locator(NOTEBOOK).count():
            self._window.goto(self._address)

    def add(self, name: str, *sources: str, raises: tuple[int, ...] = ()) -> None:
        """Write a small notebook into the served folder.

        Args:
            name: of its file.
            sources: of its code cells.
            raises: numbers of the cells that are meant to raise.
        """
        import nbformat  # takes seconds, which only the tests of pages need

        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        for number in raises:
            cells[number].metadata.tags = ["raises-exception"]
        kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
        notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
        nbformat.write(notebook, self.notebooks / name)

    def open(self, name: str) -> "Page":
        """Open a notebook in a tab and wait until all its cells and images are loaded."""
        # A test that failed has left its tab open, and the queries would read that tab.
        if self._window.locator(NOTEBOOK).count():
            Page(self._window, self.notebooks / name).close()
        page = Page(self._window, self.notebooks / name, self._screenshots)
        page.menu("File", "Open from Path…")
        field = self._window.locator(".jp-Dialog input")
        field.fill(f"notebooks/{name}")
        field.press("Enter")
        num_cells = len(json.loads(page.path.read_text())["cells"])
        self._window.wait_for_function(HAS_CELLS, arg=[NOTEBOOK, num_cells])
        return page


class Page:
    """One open notebook. ``window`` is Playwright's page, for all that has no method here."""

    def __init__(self, window, path: Path, screenshots: bool = False):
        self.window = window
        self.path = path
        self._screenshots = screenshots
        self.script_errors: list[str] = []
        window.on("pageerror", self._note)

    def _note(self, error: Exception) -> None:
        # JupyterLab raises this for work on the previous tab, which has been closed meanwhile.
        if str(error) != "Disposed":
            self.script_errors.append(str(error))

    def menu(self, menu: str, *entries: str) -> None:
        """Choose an entry of the main menu, or of menus in it, by the names on the screen."""
        self.window.get_by_role("menuitem", name=menu, exact=True).click()
        for entry in entries:
            self.window.locator(".lm-Menu-itemLabel").get_by_text(entry, exact=True).click()

    def start_all(self) -> None:
        """Start to run all cells again."""
        self._wait_until_idle()
        # The stored execution numbers would look like a run that has already ended.
        self.menu("Edit", "Clear Outputs of All Cells")
        self.menu("Run", "Run All Cells")

    def run_all(self, timeout_s: float = 300.0) -> None:
        """Run all cells again, wait until all are done or one has raised, and save."""
        self.start_all()
        self.finish(timeout_s)

    def finish(self, timeout_s: float = 60.0) -> None:
        """Wait until all cells are done or one has raised, and save."""
        deadline_s = time.monotonic() + timeout_s
        while not self._is_over():
            if time.monotonic() > deadline_s:
                self.window.screenshot(path=self._picture("late"))
                raise AssertionError(f"{self.path.name} was not done after {timeout_s:g} s")
            self.window.wait_for_timeout(POLL_MS)
        self._wait_until_idle()
        self.window.wait_for_timeout(500)  # the last outputs are still being drawn
        self.window.wait_for_function(HAS_IMAGES)
        self.save()

    def run_cell(self, index: int) -> None:
        """Run one cell by the keyboard, and wait until it is done."""
        self._wait_until_idle()
        cell = self.cell(index)
        before = cell.locator(".jp-InputPrompt").first.inner_text()
        cell.locator(".cm-content").click()
        self.window.keyboard.press("Control+Enter")
        self.window.wait_for_function(HAS_RUN, arg=[NOTEBOOK, index, before])
        self._wait_until_idle()

    def type_cell(self, index: int, source: str) -> None:
        """Replace what a code cell holds, as a learner does."""
        self.cell(index).locator(".cm-content").click()
        self.window.keyboard.press("Control+a")
        self.window.keyboard.insert_text(source.strip())

    def restart_kernel(self) -> None:
        """Restart the kernel and clear all outputs, by the menu."""
        self._wait_until_idle()
        self.menu("Kernel", "Restart Kernel and Clear Outputs of All Cells…")
        self.window.locator(".jp-Dialog .jp-mod-accept").click()
        self.window.locator(".jp-Dialog").wait_for(state="detached")
        self._wait_until_idle()

    def _wait_until_idle(self) -> None:
        # The notebook's own indicator also says idle before there is a kernel.
        self.window.locator("#jp-main-statusbar", has_text="| Idle").wait_for(timeout=60_000)

    def _is_over(self) -> bool:
        prompts = self.window.evaluate(READ_PROMPTS, NOTEBOOK)
        return "*" not in prompts and bool(re.search(r"\d", prompts))

    def save(self) -> None:
        """Write the notebook with its outputs to its file, `path`."""
        self.window.keyboard.press("Control+s")
        self.window.locator(".lm-TabBar-tab.jp-mod-dirty").wait_for(state="detached")

    def cells(self) -> list[dict]:
        """What the page shows: a dict with prompt, images and text for each cell."""
        return self.window.evaluate(READ_CELLS, NOTEBOOK)

    def problems(self) -> list[str]:
        """Everything that a learner would see as broken after `run_all`; empty if nothing is."""
        import nbformat

        stored = nbformat.read(self.path, as_version=4).cells
        found = [f"script error: {error}" for error in self.script_errors]
        for index, (cell, shown) in enumerate(zip(stored, self.cells(), strict=True)):
            found += [f"cell {index}: {text}" for text in _cell_problems(cell, shown)]
        return found

    def cell(self, index: int):
        """Playwright's locator of a cell."""
        return self.window.locator(f"{NOTEBOOK} .jp-Notebook .jp-Cell").nth(index)

    def move_slider(self, cell: int, number: int, *keys: str) -> None:
        """Press keys (ArrowRight, ArrowLeft, Home, End) on the cell's slider of this number."""
        handle = self.cell(cell).locator(".widget-slider .noUi-handle").nth(number)
        handle.focus()
        for key in keys:
            handle.press(key)

    def press_button(self, name: str) -> None:
        """Press a widget's button by the keyboard."""
        button = self.window.locator(".widget-button", has_text=name)
        button.focus()
        button.press("Enter")

    def wait_for_text(self, text: str, timeout_s: float = 20.0) -> None:
        """Wait until the text is on the page: what a slider changed, in most cases."""
        outputs = self.window.locator(f"{NOTEBOOK} .jp-Cell-outputWrapper", has_text=text)
        outputs.first.wait_for(timeout=timeout_s * 1000)

    def wait_for_image(self, cell: int, *words: str, timeout_s: float = 20.0) -> dict:
        """Wait until the alt text of the cell's image has all these words; its source and alt."""
        selector = "".join(f'[alt*="{part}"]' for part in words)
        image = self.cell(cell).locator(f"img{selector}")
        image.wait_for(timeout=timeout_s * 1000)
        return image.evaluate("one => ({source: one.src, alt: one.alt})")

    def save_screenshots(self) -> list[Path]:
        """Save the whole notebook as NAME.1.png, NAME.2.png ..., from top to bottom."""
        for old in SCREENSHOTS.glob(f"{self.path.stem}.*.png"):
            old.unlink()
        self._close_side_bar()
        view = self.window.locator(f"{NOTEBOOK} .jp-WindowedPanel-outer")
        height, window = view.evaluate("view => [view.scrollHeight, view.clientHeight]")
        saved = []
        for top in range(0, height, window)[:MAX_SLICES]:
            view.evaluate("(view, top) => view.scrollTo(0, top)", top)
            self.window.wait_for_timeout(150)
            saved.append(self._picture(str(len(saved) + 1)))
            view.screenshot(path=saved[-1])
        return saved

    def _picture(self, mark: str) -> Path:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        return SCREENSHOTS / f"{self.path.stem}.{mark}.png"

    def _close_side_bar(self) -> None:
        if self.window.locator("#jp-left-stack").is_visible():
            self.window.keyboard.press("Control+b")

    def close(self) -> None:
        """Close the tab, which ends its kernel."""
        if self._screenshots:
            self.save_screenshots()
        self.menu("File", "Close Tab")
        self.window.wait_for_function(IS_CLOSED_OR_ASKS, arg=NOTEBOOK)
        # It asks whether to save: a kernel that has just started changes the notebook's metadata.
        discard = self.window.get_by_role("button", name="Discard")
        if discard.is_visible():
            discard.click()
        self.window.locator(NOTEBOOK).wait_for(state="detached")


def _cell_problems(cell, shown: dict) -> list[str]:
    found = ["an image does not show" for image in shown["images"] if not image["width"]]
    if "Error displaying widget" in shown["text"]:
        found.append("a widget does not show")
    if cell.cell_type != "code" or not cell.source.strip():
        return found
    if cell.execution_count is None:
        found.append("never ran")
    if "raises-exception" not in cell.metadata.get("tags", []):
        errors = [output for output in cell.outputs if output.output_type == "error"]
        found += [f"{error.ename}: {error.evalue}" for error in errors]
    return found
