"""What all tests share: the settings of their processes, their order, JupyterLab in a browser."""

import atexit
import gc
import itertools
import os
import shutil
import signal
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

import kernel_ports
import lean_imports  # noqa: F401
import pytest
import warm_python

from workbook.kernels.provisioner import WarmProvisioner

ROOT = Path(__file__).resolve().parents[1]
_TESTS = itertools.count()
# What takes minutes, or an environment that a fresh clone lacks: ``make test-more``.
MORE = (
    "measure/test_elsewhere_tensorflow.py",
    "measure/test_ray_two_hosts.py",
    "measure/test_two_hosts.py",
    "measure/test_two_hosts_runs.py",
    "project/test_pretended.py",
    "project/test_scripts.py",
    "runtime/test_ray.py",
    "runtime/test_storm.py",
    "tests/test_agents.py",
)


def pytest_configure(config):
    # Most tests name no device, and their tensors are on the CPU. torch and the kernels of
    # notebooks read this when they first look for GPUs.
    if os.environ.get("LABKIT_TEST_GPUS") != "1":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    config.addinivalue_line("markers", "browser: drives JupyterLab in headless Chromium")
    config.addinivalue_line("markers", "fresh: waits for a new process that imports torch")
    config.addinivalue_line("markers", "slow: runs, draws or waits for more than a second")
    config.addinivalue_line("markers", "more: in make test-more, not in make test")
    # A script's background jobs, and all their children, start with Ctrl-C ignored. The tests that
    # press Ctrl-C need children as a terminal starts them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Until all tests are imported: imports are much quicker without garbage collection.
    gc.disable()
    # Two tests and their ranks share the cores: OpenMP's threads must not spin while they wait,
    # here and in the notebooks' kernels. (It is read when torch is imported.)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # A warning in our own code is an error, in ranks and other processes as well. (pyproject.toml
    # does the same for this process.)
    files = [*ROOT.glob("labkit/**/*.py"), *ROOT.glob("workbook/**/*.py")]
    modules = (path.relative_to(ROOT).with_suffix("") for path in files)
    names = (".".join(module.parts).removesuffix(".__init__") for module in modules)
    os.environ["PYTHONWARNINGS"] = ",".join(f"error:::{name}" for name in sorted(names))
    # The tests may run on a machine with other users, to whom RPC is open for seconds.
    os.environ.setdefault("LABKIT_TRUST_LOCAL_USERS", "1")
    # Kernels must not read or write the user's own Jupyter and IPython folders. Theirs are not
    # inside the folder of the process that starts this one, which may end and clean up first.
    parent = os.environ.setdefault("TESTS_TMPDIR", tempfile.gettempdir())
    folder = Path(tempfile.mkdtemp(prefix="lk-", dir=parent))
    # After multiprocessing (priority -100), which has a folder in there and expects to remove it.
    Finalize(None, shutil.rmtree, (folder,), {"ignore_errors": True}, exitpriority=-200)
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
        os.environ[name] = str(folder / name.lower())
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    # Nor write into the progress of the person who runs the tests.
    os.environ["LABKIT_PROGRESS"] = str(folder / "progress" / "all.json")
    kernel_ports.install()
    # Each process has its own temporary folder, so that a file in it was left there by a test.
    # Its path is short, since the path of a socket has at most 107 characters.
    os.environ["TMPDIR"] = str(folder / "t")
    (folder / "t").mkdir()
    tempfile.tempdir = None
    if "PYTEST_XDIST_WORKER" not in os.environ:
        warm_python.start(folder)
    if config.pluginmanager.hasplugin("nbval"):
        WarmProvisioner.executable = warm_python.command()


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.as_posix().endswith(MORE):
            item.add_marker(pytest.mark.more)


def pytest_collection_finish(session):
    import cloudpickle

    from labkit.engine.runtime import preload

    # The functions of tests go to ranks by value, like those of a notebook.
    for module in {item.module for item in session.items if hasattr(item, "module")}:
        cloudpickle.register_pickle_by_value(module)
    # Functions that ranks run contain pytest's asserts: import them once, not in every rank.
    preload.FOR_RANKS.append("_pytest.assertion.rewrite")
    # Most test processes also train: their forkserver imports what that needs at once.
    preload.FOR_RANKS.extend(preload.FOR_TRAINING)
    # Imported objects are not garbage: without them, tests that collect garbage are quicker.
    gc.freeze()
    gc.enable()
    # Some libraries report objects that are still frozen at the end of a process as leaks.
    atexit.register(gc.unfreeze)


@pytest.fixture(autouse=True)
def _live_output(monkeypatch):
    """Turn live output on: the Makefile turns it off for notebooks, and the tests test it."""
    monkeypatch.delenv("LABKIT_LIVE", raising=False)


@pytest.fixture(autouse=True)
def _progress_file(monkeypatch):
    """Each test begins without any progress, in a file that does not exist yet."""
    path = Path(os.environ["LABKIT_PROGRESS"]).with_name(f"{next(_TESTS)}.json")
    monkeypatch.setenv("LABKIT_PROGRESS", str(path))


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab on a copy of the notebooks, and a browser to drive it: a `browser.Lab`.

    It is closed before any other test: while Playwright is open its event loop occupies the main
    thread, which the kernels of other tests need.
    """
    import browser

    if missing := browser.missing():
        pytest.skip(missing)
    with browser.open_lab(tmp_path_factory.mktemp("lab")) as opened:
        yield opened
