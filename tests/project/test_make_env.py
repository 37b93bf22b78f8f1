"""``make env``: which build of PyTorch is asked for, what is kept, and what a failure leaves.

The real Makefile runs in a folder of its own, with programs that note what they are asked.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="needs make")

UV = """#!/bin/sh
cd "$(dirname "$0")/../.."
case "$*" in
  "pip freeze"*) cat installed; exit 0;;
  *"-e ."*) exit 0;;
esac
echo "$*" >> asked; env | grep ^UV_ > variables
case "$(cat uv_does)" in
  fail) echo "error: Failed to fetch" >&2; exit 2;;
  stop_halfway) echo "torch==half" > installed; exit 2;;
esac
"""
OTHERS = """#!/bin/sh
case "$*" in --version) echo "pip 1 from $(cd "$(dirname "$0")/.." && pwd)/lib";; esac
"""
# The python3 of the machine: what the Makefile asks it is true, and it runs the tool.
SYSTEM = f"""#!/bin/sh
case "$1" in tools/*) exec {sys.executable} -IS "$@";; esac
"""
INSTALL = "pip install --python .venv/bin/python --compile-bytecode "
BY_FORCE = "--exact --reinstall-package torch --reinstall-package torchvision "
DEFAULT = "--require-hashes -r requirements.txt"
OF_BUILD = "--verify-hashes --torch-backend {} -r .venv/pins.txt"


class Workbook:
    """A folder with this repository's Makefile and a .venv of programs that only take notes."""

    def __init__(self, folder: Path):
        self.folder, self.ready = folder, folder / ".venv" / ".ready"
        (folder / "tools").mkdir()
        copied = ("Makefile", "requirements.txt", "pyproject.toml", "tools/uv.txt")
        for name in (*copied, "tools/torch_build.py"):
            shutil.copy(ROOT / name, folder / name)
        (folder / ".venv" / "bin").mkdir(parents=True)
        programs = {"uv": UV, "python": OTHERS, "pip": OTHERS, "../../python3": SYSTEM}
        for name, text in programs.items():
            program = folder / ".venv" / "bin" / name
            program.write_text(text)
            program.chmod(0o755)
        (folder / "installed").write_text("torch==1\n")

    def make(self, torch="", uv_does="succeed", code=0) -> tuple[list[str], str]:
        """(what uv was asked to install, what make said)."""
        (self.folder / "asked").write_text("")
        (self.folder / "uv_does").write_text(uv_does)
        inherited = {k: v for k, v in os.environ.items() if k not in ("TORCH", "MAKEFLAGS")}
        command = ["make", "env", "PYTHON=./python3", *[f"TORCH={torch}"] * bool(torch)]
        done = subprocess.run(
            command, cwd=self.folder, env=inherited, capture_output=True, text=True, timeout=60
        )
        said = done.stdout + done.stderr
        assert (done.returncode != 0) == (code != 0), said
        return (self.folder / "asked").read_text().splitlines(), said


@pytest.fixture
def book(tmp_path):
    return Workbook(tmp_path)


@pytest.fixture
def set_up(book):
    book.make()
    return book


def asked_for(build, by_force=BY_FORCE):
    return [INSTALL + by_force + (DEFAULT if build == "default" else OF_BUILD.format(build))]


def test_by_default_every_file_has_a_hash_and_settings_of_uv_cannot_undo_it(book, monkeypatch):
    names = {"UV_NO_VERIFY_HASHES", "UV_TORCH_BACKEND", "UV_REQUIRE_HASHES"}
    for name in names:
        monkeypatch.setenv(name, "1")
    assert book.make()[0] == asked_for("default")
    seen = {line.split("=")[0] for line in (book.folder / "variables").read_text().splitlines()}
    assert "UV_HTTP_TIMEOUT" in seen
    assert not seen & names
    assert book.ready.read_text().splitlines() == [str(book.folder), "default"]
    assert book.make()[0] == []


@pytest.mark.parametrize(("torch", "build"), [("cpu", "cpu"), ("auto", "auto"), ("12.8", "cu128")])
def test_the_choice_is_handed_to_uv_and_kept_until_another_is_made(torch, build, set_up):
    assert set_up.make(torch)[0] == asked_for(build)
    assert set_up.make()[0] == []
    os.utime(set_up.folder / "requirements.txt", (2**32, 2**32))
    assert set_up.make()[0] == asked_for(build, by_force="")
    os.utime(set_up.folder / "requirements.txt", (1, 1))
    assert set_up.make("default")[0] == asked_for("default")
    assert set_up.make()[0] == []


def test_what_cannot_be_reached_leaves_the_environment_as_it_was(set_up):
    before = set_up.ready.read_text(), set_up.ready.stat().st_mtime_ns
    asked, said = set_up.make("cpu", uv_does="fail", code=2)
    assert asked == asked_for("cpu")
    assert ".venv is as it was: make lab" in said
    assert (set_up.ready.read_text(), set_up.ready.stat().st_mtime_ns) == before
    assert set_up.make()[0] == []


def test_an_environment_changed_halfway_is_not_called_ready_and_gets_its_build_by_force(set_up):
    set_up.make("cpu")
    _, said = set_up.make("12.8", uv_does="stop_halfway", code=2)
    assert "not complete" in said
    assert set_up.make(uv_does="fail", code=2)[0] == asked_for("cpu")
    assert not set_up.ready.exists()
    assert set_up.make()[0] == asked_for("cpu")
    assert set_up.make()[0] == []


@pytest.mark.parametrize("torch", ["2.11.0", "gpu", "; touch harm"])
def test_what_is_no_build_is_refused_before_anything_happens(torch, set_up):
    asked, said = set_up.make(torch, code=2)
    assert asked == []
    assert f"TORCH={torch} is not a build of PyTorch" in said
    assert not list(set_up.folder.glob("*harm*"))
    assert set_up.make()[0] == []
