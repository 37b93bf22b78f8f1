"""JupyterLab in headless Chromium, for tests: open a notebook, run it, read it.

A test takes the fixture ``lab`` of conftest.py, a `Lab`.
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

import kernel_ports
import warm_python

ROOT = Path(__file__).resolve().parents[1]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM_OPTIONS = [
    *("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
SERVER_OPTIONS = [
    "--no-browser",
    "--ServerApp.ip=127.0.0.1",
    # If the tests are killed before they can end the server, it ends by itself.
    "--ServerApp.shutdown_no_activity_timeout=300",
    "--MappingKernelManager.cull_idle_timeout=300",
    "--MappingKernelManager.cull_interval=30",
]
LAUNCH = f"""
import sys
sys.path.append({str(Path(__file__).parent)!r})
import kernel_ports
kernel_ports.install()
from workbook.kernels.provisioner import WarmProvisioner
WarmProvisioner.executable = {warm_python.command()!r}
from workbook.lab import main
sys.exit(main(sys.argv[1:]))
"""
# All cells are in the page at the same time: by default, JupyterLab leaves out those that are out
# of sight. A tab that is closed ends its kernel without asking.
SETTINGS = {
    "@jupyterlab/notebook-extension/tracker": '{"windowingMode": "none", "kernelShutdown": true}'
}

NOTEBOOK = ".jp-NotebookPanel:not(.lm-mod-hidden)"
# Whether cells have run, none is running or waits, and the images are there.
HAS_RUN = """notebook => {
  const prompts = [...document.querySelectorAll(notebook + ' .jp-InputPrompt')];
  const shown = prompts.map(prompt => prompt.textContent).join(' ');
  return /[0-9]/.test(shown) && !shown.includes('*')
    && [...document.images].every(image => image.complete);
}"""
# One entry per cell, in the order of the notebook.
READ_CELLS = """
notebook => [...document.querySelectorAll(notebook + ' .jp-Notebook .jp-Cell')].map(cell => ({
  images: [...cell.querySelectorAll('img')]
    .map(image => ({alt: image.alt, width: image.complete ? image.naturalWidth : 0})),
  errors: [...cell.querySelectorAll('[data-mime-type="application/vnd.jupyter.error"]')]
    .map(error => error.innerText),
  text: cell.querySelector('.jp-Cell-outputWrapper')?.innerText ?? '',
}))
"""
# Whether the notebook in front has this number of cells, all of them rendered.
HAS_CELLS = """
([notebook, number]) =>
  document.querySelectorAll(notebook + ' .jp-Notebook .jp-Cell').length == number
  && [...document.images].every(image => image.complete)
"""
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
def open_lab(folder: Path) -> Iterator["Lab"]:
    """Serve a copy of the notebooks with `labkit lab`, open a browser, and end both at the end.

    The process that its kernels are forked from is a fork itself, see ``warm_python``.
    """
    from playwright.sync_api import sync_playwright

    workbook = folder / "workbook"
    (workbook / "notebooks").mkdir(parents=True)
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(path, workbook / "notebooks")
    with serve(folder, workbook) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=CHROMIUM_OPTIONS)
        try:
            yield Lab(browser, address, workbook / "my_course")
        finally:
            browser.close()


@contextlib.contextmanager
def serve(folder: Path, workbook: Path) -> Iterator[str]:
    """Run `labkit lab` in the workbook; yields its address, ends it by one interrupt."""
    # As in a learner's shell: with PYTEST_CURRENT_TEST, kernels treat child processes differently.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_CURRENT", "LABKIT_"))}
    for name in ("CONFIG", "DATA", "RUNTIME"):
        env[f"JUPYTER_{name}_DIR"] = str(folder / name.lower())
    env["JUPYTERLAB_WORKSPACES_DIR"] = str(folder / "workspaces")
    env["JUPYTERLAB_SETTINGS_DIR"] = str(folder / "settings")
    env["JUPYTER_TOKEN"] = secrets.token_hex(16)
    # Not the progress of the person who runs the tests.
    env["LABKIT_PROGRESS"] = str(folder / "progress.json")
    for plugin, text in SETTINGS.items():
        path = folder / "settings" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    log = folder / "jupyterlab.log"
    options = [*SERVER_OPTIONS, f"--ServerApp.port={kernel_ports.free_port()}"]
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, *options],
            cwd=workbook,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline_s = time.monotonic() + 60
        while not (found := re.search(r"(http://\S+?)/lab\S*", log.read_text())):
            is_late = time.monotonic() > deadline_s or process.poll() is not None
            assert not is_late, f"JupyterLab did not start:\n{log.read_text()}"
            time.sleep(0.1)
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Lab:
    """One JupyterLab in one browser window. ``notebooks`` is the learner's: tests may add to it.

    Notebooks are opened as tabs of that window, one at a time, since loading JupyterLab takes
    seconds.
    """

    def __init__(self, browser, address: str, notebooks: Path):
        self.notebooks = notebooks
        self._window = browser.new_page(viewport={"width": 1280, "height": 1600})
        base, query = address.split("/lab", 1)
        # Not the page that opens first for learners: a test opens that one.
        self._window.goto(f"{base}/lab/tree/my_course{query[query.index('?') :]}&reset")

    def add(self, name: str, *sources: str) -> None:
        """Write a small notebook with these code cells into the served folder."""
        import nbformat  # takes seconds, which only the tests of pages need

        cells = [nbformat.v4.new_code_cell(source) for source in sources]
        kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
        notebook = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
        nbformat.write(notebook, self.notebooks / name)

    def open(self, name: str) -> "Page":
        """Open a notebook in a tab and wait until all its cells and images are loaded."""
        # A test that failed has left its tab open, and the queries would read that tab.
        if self._window.locator(NOTEBOOK).count():
            Page(self._window, self.notebooks / name).close()
        page = Page(self._window, self.notebooks / name)
        page.menu("File", "Open from Path…")
        field = self._window.locator(".jp-Dialog input")
        field.fill(f"my_course/{name}")
        field.press("Enter")
        num_cells = len(json.loads(page.path.read_text())["cells"])
        self._window.wait_for_function(HAS_CELLS, arg=[NOTEBOOK, num_cells])
        return page


class Page:
    """One open notebook. ``window`` is Playwright's page, for all that has no method here."""

    def __init__(self, window, path: Path):
        self.window, self.path = window, path
        self._script_errors: list[str] = []
        window.on("pageerror", lambda error: self._script_errors.append(str(error)))

    def menu(self, menu: str, *entries: str) -> None:
        """Choose an entry of the main menu, or of menus in it, by the names on the screen."""
        self.window.get_by_role("menuitem", name=menu, exact=True).click()
        for entry in entries:
            self.window.locator(".lm-Menu-itemLabel").get_by_text(entry, exact=True).click()

    def start_all(self) -> None:
        """Start to run all cells again."""
        self.wait_until_idle()
        # The stored execution numbers would look like a run that has already ended.
        self.menu("Edit", "Clear Outputs of All Cells")
        self.menu("Run", "Run All Cells")

    def run_all(self) -> None:
        """Run all cells again, and wait until all are done or one has raised."""
        self.start_all()
        self.finish()

    def finish(self) -> None:
        """Wait until all cells are done, or one has raised."""
        self.window.wait_for_function(HAS_RUN, arg=NOTEBOOK, timeout=120_000)
        self.wait_until_idle()

    def type_cell(self, index: int, source: str) -> None:
        """Replace what a code cell holds, as a learner does."""
        self.cell(index).locator(".cm-content").click()
        self.window.keyboard.press("Control+a")
        self.window.keyboard.insert_text(source.strip())

    def wait_until_idle(self) -> None:
        # The notebook's own indicator also says idle before there is a kernel.
        self.window.locator("#jp-main-statusbar", has_text="| Idle").wait_for(timeout=60_000)

    def cells(self) -> list[dict]:
        """What the page shows: a dict with images, errors and text for each cell."""
        return self.window.evaluate(READ_CELLS, NOTEBOOK)

    def problems(self) -> list[str]:
        """Everything that a learner would see as broken; empty if nothing is."""
        # JupyterLab raises Disposed for work on the previous tab, which has been closed meanwhile.
        found = [f"script error: {error}" for error in self._script_errors if error != "Disposed"]
        for index, shown in enumerate(self.cells()):
            broken = ["an image" for image in shown["images"] if not image["width"]]
            broken += ["a widget"] * ("Error displaying widget" in shown["text"])
            found += [f"cell {index}: {text}" for text in [*broken, *shown["errors"]]]
        return found

    def cell(self, index: int):
        """Playwright's locator of a cell."""
        return self.window.locator(f"{NOTEBOOK} .jp-Notebook .jp-Cell").nth(index)

    def close(self) -> None:
        """Close the tab, which ends its kernel."""
        self.menu("File", "Close Tab")
        self.window.wait_for_function(IS_CLOSED_OR_ASKS, arg=NOTEBOOK)
        # It asks whether to save: a kernel that has just started changes the notebook's metadata.
        discard = self.window.get_by_role("button", name="Discard")
        if discard.is_visible():
            discard.click()
        self.window.locator(NOTEBOOK).wait_for(state="detached")
