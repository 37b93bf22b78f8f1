"""What all tests share: Jupyter folders of their own, and JupyterLab in a browser."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

_folder = None


def pytest_configure(config):
    global _folder
    config.addinivalue_line("markers", "browser: drives JupyterLab in headless Chromium")
    # Kernels must neither read nor fill the person's own Jupyter and IPython folders.
    _folder = Path(tempfile.mkdtemp(prefix="labkit-tests-"))
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        os.environ[name] = str(_folder / name.lower())
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"


def pytest_unconfigure(config):
    shutil.rmtree(_folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _live_output(monkeypatch):
    """The notebooks run without live output (see the Makefile); the tests test it."""
    monkeypatch.delenv("LABKIT_LIVE", raising=False)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab on a copy of the notebooks, and a browser to drive it: a `browser.Lab`.

    One for a module, not for the session: while Playwright is open its event loop occupies the
    main thread, which the notebook kernels of later tests need.
    """
    import browser

    missing = browser.missing()
    if missing:
        pytest.skip(missing)
    with browser.open_lab(tmp_path_factory.mktemp("lab")) as opened:
        yield opened
