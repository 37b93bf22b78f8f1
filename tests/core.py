"""The core alone: a copy of labkit and its tests, without the course that is built on it.

``make test-core`` runs all of the core's tests there; tests/project/test_core.py a few.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The tests of workbook.
COURSE = {"exercises", "plots", "widgets", "notebook", "measure"}
# Tests of parts that need the course: the command line, the names of ``labkit``, the workbook.
NOT_CORE = {
    "project",
    "test_cli.py",
    "test_cli_own.py",
    "test_limits.py",
    "test_init.py",
    "test_lab.py",
}

# An installed course, or one in another folder, could still be imported: this blocks it.
TAKE_AWAY = """
import sys


class TakenAway:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "workbook":
            raise ModuleNotFoundError(f"{name} is taken away", name=name)


sys.meta_path.insert(0, TakenAway())
"""

ALONE = """
import importlib
import pkgutil

import pytest
import torch

import labkit


def test_the_course_is_taken_away():
    with pytest.raises(ModuleNotFoundError, match="taken away"):
        importlib.import_module("workbook")


def test_every_module_imports():
    modules = [module.name for module in pkgutil.walk_packages(labkit.__path__, "labkit.")]
    assert len(modules) > 80
    for name in modules:
        importlib.import_module(name)


def test_ranks_run():
    def sums(comm):
        return labkit.collectives.ring_all_reduce(comm, torch.full((5,), comm.rank + 1.0)).tolist()

    labkit.warm_up(training=False)
    assert labkit.run(sums, world_size=2).values == [[3.0] * 5] * 2
"""


def copy_core(folder: Path) -> None:
    """Copy the core, its tests and the files that they read into an empty folder."""

    def left_out(path: str, names: list[str]) -> set[str]:
        return {"__pycache__"} | (COURSE | NOT_CORE if path == str(ROOT / "tests") else set())

    for part in ("labkit", "tests", "data/digits"):
        shutil.copytree(ROOT / part, folder / part, ignore=left_out)
    for name in ("pyproject.toml", "data/README.md"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "sitecustomize.py").write_text(TAKE_AWAY)
    (folder / "tests" / "test_alone.py").write_text(ALONE)


def run_tests(folder: Path, *arguments: str, **settings) -> subprocess.CompletedProcess:
    """Run pytest on the tests of the copy."""
    command = [sys.executable, "-m", "pytest", "-p", "no:nbval", "tests", *arguments]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, **settings)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="core-") as place:
        copy_core(Path(place))
        sys.exit(run_tests(Path(place), *sys.argv[1:]).returncode)
