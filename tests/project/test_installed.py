"""The wheel in an environment that has what it asks for and nothing more, far from the clone."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution, packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from test_setup import PROJECT, ROOT

from labkit.extras import EXTRAS

SCRIPT = """\
import labkit

if __name__ == "__main__":
    print(labkit.__version__, labkit.__file__)
    print(labkit.run(lambda comm: comm.rank, world_size=2).values)
"""
TRAIN = ("train", "--strategy", "ddp", "--world-size", "2", "--train-size", "128")


def with_what_they_need(requirements) -> set[str]:
    """The distributions that these requirements bring, by their names."""
    names, todo = set(), list(requirements)
    while todo:
        wanted = todo.pop()
        found = distribution(wanted.name)
        names.add(found.name)
        for needed in map(Requirement, found.requires or ()):
            environments = [{"extra": extra} for extra in ("", *wanted.extras)]
            counts = needed.marker is None or any(map(needed.marker.evaluate, environments))
            if counts and (needed.extras or distribution(needed.name).name not in names):
                todo.append(needed)
    return names


@pytest.fixture(scope="module")
def call(tmp_path_factory):
    """A function that calls a program of an environment with labkit's wheel alone.

    It has links to the packages that the wheel asks for, and is made without network.
    """
    folder = tmp_path_factory.mktemp("installed")
    hidden = ("PYTHONPATH", "PYTHONWARNINGS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}

    def call(program, *words, code=0) -> str:
        command = [folder / "env" / "bin" / program, *words]
        options = {"cwd": folder, "env": environment, "capture_output": True, "text": True}
        done = subprocess.run(command, **options)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    for name in ("labkit", "workbook"):
        shutil.copytree(ROOT / name, folder / "source" / name)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    pip, offline = (sys.executable, "-m", "pip", "--quiet"), ("--no-index", "--no-cache-dir")
    call(*pip, "wheel", *offline, "--no-build-isolation", "--no-deps", "./source")
    call(sys.executable, "-m", "venv", "--without-pip", "env")
    (packages,) = folder.glob("env/lib/python*/site-packages")
    for name in with_what_they_need(map(Requirement, PROJECT["dependencies"])):
        found = distribution(name)
        for top in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(found.locate_file(top))
    # pip refuses what the wheel asks for and the links do not give.
    call(*pip, "--python", folder / "env", "install", *offline, *folder.glob("*.whl"))
    return call


def test_the_extras_are_those_of_pyproject():
    of_package = packages_distributions()
    for extra, packages in EXTRAS.items():
        named = {Requirement(text).name for text in PROJECT["optional-dependencies"][extra]}
        brought = {of_package.get(package, [package])[0] for package in packages}
        assert set(map(canonicalize_name, brought)) == named


@pytest.mark.more
def test_it_trains_on_digits_with_pytorchs_ddp_on_our_backend(call):
    assert "replicas agree: True" in call("labkit", *TRAIN, "--builtin", "--backend", "labkit")


@pytest.mark.more
def test_a_script_runs_a_function_on_ranks(call, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    installed, values = call("python", tmp_path / "script.py").splitlines()
    assert installed.startswith("0.2.0 ")
    assert "site-packages" in installed
    assert values == "[0, 1]"


@pytest.mark.more
def test_doctor_says_what_is_not_there(call):
    printed = call("labkit", "doctor")
    for package in ("jupyterlab", "matplotlib", "torchvision", "ipywidgets", "tensorboard"):
        assert package in printed
    assert "labkit runs on this machine." in printed
    assert "The course runs" not in printed


@pytest.mark.more
@pytest.mark.parametrize(
    ("words", "package", "extra"),
    [
        (("bench",), "tabulate", "course"),
        ((*TRAIN, "--model", "resnet18"), "torchvision", "course"),
        ((*TRAIN, "--log-dir", "logs"), "tensorboard", "tensorboard"),
    ],
)
def test_what_needs_an_extra_names_it_in_one_line(call, words, package, extra):
    (line,) = call("labkit", *words, code=2).splitlines()
    assert f"needs {package}, " in line
    assert f"labkit's extra {extra} " in line
