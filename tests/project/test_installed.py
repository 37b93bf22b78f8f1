"""The wheel in an environment that has what it asks for and nothing more, far from the clone."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_setup import PROJECT, ROOT

from labkit.extras import EXTRAS

SCRIPT = """\
import labkit

def total(comm):
    import torch
    return int(labkit.collectives.ring_all_reduce(comm, torch.ones(4)).sum())

if __name__ == "__main__":
    print(labkit.__version__, labkit.__file__, labkit.run(total, world_size=2).values)
"""
TRAIN = ("train", "--strategy", "ddp", "--world-size", "2", "--train-size", "128")


def with_what_they_need(texts) -> set[str]:
    """The distributions that these requirements bring, by their names."""
    names = set()
    todo = [Requirement(text) for text in texts]
    while todo:
        wanted = todo.pop()
        found = distribution(wanted.name)
        names.add(found.name)
        for needed in map(Requirement, found.requires or ()):
            extras = ("", *wanted.extras)
            marker = needed.marker
            counts = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
            if counts and (needed.extras or distribution(needed.name).name not in names):
                todo.append(needed)
    return names


class Installed:
    """An environment with labkit's wheel, and links to the packages that it asks for."""

    def __init__(self, folder: Path):
        self.folder, self.programs = folder, folder / "env" / "bin"
        source = folder / "source"
        for package in ("labkit", "workbook"):
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / package, source / package, ignore=ignored)
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
        offline = ("--quiet", "--no-index", "--no-cache-dir")
        self.call(*pip, "wheel", *offline, "--no-build-isolation", "--no-deps", "./source")
        self.call(sys.executable, "-m", "venv", "--without-pip", "env")
        (packages,) = folder.glob("env/lib/python*/site-packages")
        for name in with_what_they_need(PROJECT["dependencies"]):
            found = distribution(name)
            for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
                if not (packages / top).exists():
                    (packages / top).symlink_to(found.locate_file(top))
        # pip refuses what the wheel asks for and the links do not give.
        (wheel,) = folder.glob("*.whl")
        to = ("--python", str(self.programs / "python"))
        self.call(*pip, *to, "install", *offline, str(wheel))

    def call(self, *words: str, code: int = 0) -> str:
        """What a command prints, in a folder beside the environment."""
        hidden = ("PYTHONPATH", "PYTHONWARNINGS")
        environment = {k: v for k, v in os.environ.items() if k not in hidden}
        done = subprocess.run(
            words, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def labkit(self, *words: str, code: int = 0) -> str:
        return self.call(str(self.programs / "labkit"), *words, code=code)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("installed"))


def test_the_extras_are_those_of_pyproject():
    distributions = packages_distributions()
    for extra, packages in EXTRAS.items():
        named = {Requirement(text).name for text in PROJECT["optional-dependencies"][extra]}
        brought = {distributions.get(package, [package])[0] for package in packages}
        assert set(map(canonicalize_name, brought)) == set(map(canonicalize_name, named))


@pytest.mark.more
def test_it_trains_on_digits_with_pytorchs_ddp_on_our_backend(installed):
    assert "replicas agree: True" in installed.labkit(*TRAIN, "--builtin", "--backend", "labkit")


@pytest.mark.more
def test_a_script_runs_a_function_on_ranks(installed):
    (installed.folder / "script.py").write_text(SCRIPT)
    version, path, values = installed.call(str(installed.programs / "python"), "script.py").split(
        maxsplit=2
    )
    assert version == "0.2.0"
    assert Path(path).is_relative_to(installed.folder)
    assert values.strip() == "[8, 8]"


@pytest.mark.more
def test_doctor_says_what_is_not_there(installed):
    printed = installed.labkit("doctor")
    for package in ("jupyterlab", "matplotlib", "torchvision", "ipywidgets", "tensorboard"):
        assert package in printed
    assert "labkit runs on this machine." in printed
    assert "The course runs" not in printed


@pytest.mark.more
@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (("lab",), "jupyterlab", "course"),
        (("bench",), "tabulate", "course"),
        ((*TRAIN, "--model", "resnet18"), "torchvision", "course"),
        ((*TRAIN, "--log-dir", "logs"), "tensorboard", "tensorboard"),
    ],
)
def test_what_needs_an_extra_names_it_in_one_line(installed, words, package, extra):
    # labkit lab looks for pages before it opens them.
    (installed.folder / "notebooks").mkdir(exist_ok=True)
    printed = installed.labkit(*words, code=2)
    assert len(printed.splitlines()) == 1
    assert f"needs {package}, " in printed
    assert f"labkit's extra {extra} " in printed
