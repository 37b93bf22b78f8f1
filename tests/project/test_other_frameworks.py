"""``make horovod``, ``make tensorflow``: made once, anew when it must be, and never half.

The real program runs in a folder of its own, with a uv that only takes notes.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workbook.measure import environments
from workbook.measure.environments import why_not

ROOT = Path(__file__).resolve().parents[2]

# It notes what it is asked, and fails where the file "fails" names a word of that.
UV = """#!/bin/sh
here=$(cd "$(dirname "$0")/../.." && pwd)
case "$1" in
  venv) echo venv >> "$here/asked"; for folder; do :; done
    torch="$folder/lib/python3.11/site-packages/torch"; mkdir -p "$folder/bin" "$torch"
    ln "$here/version.py" "$torch"; cp "$here/program" "$folder/bin/python"
    cp "$here/program" "$folder/bin/horovodrun";;
  *) case "$*" in *--no-build-isolation*) what=compile;; *) what=packages;; esac
    echo $what >> "$here/asked"; [ "$(cat "$here/fails" 2>/dev/null)" = $what ] && exit 1
    env | grep -E "^HOROVOD_" > "$here/switches"; exit 0;;
esac
"""
PROGRAM = """#!/bin/sh
here=$(cd "$(dirname "$0")/../.." && pwd)
[ "$(cat "$here/fails" 2>/dev/null)" = try ] && exit 1
echo "[1]<stdout>:sum 3.0"; echo "devices 2"
"""


class Clone:
    """A folder with the pins, the tools, and programs that only take notes."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in (".venv/bin", "workbook/measure"):
            (folder / name).mkdir(parents=True)
        shutil.copytree(ROOT / "tools", folder / "tools")
        shutil.copy(environments.__file__, folder / "workbook/measure")
        (folder / "version.py").write_text("cuda: str = '11.7'\nhip = None\n")
        for name, text in {".venv/bin/uv": UV, "program": PROGRAM}.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def make(self, framework="horovod", fails="") -> tuple[int, list[str]]:
        """Run the program: (exit code, what uv was asked)."""
        (self.folder / "fails").write_text(fails)
        program = self.folder / "tools" / "other_framework.py"
        shell = os.environ | {"HOROVOD_WITH_MPI": "1"}
        done = subprocess.run([sys.executable, program, framework], env=shell, timeout=60)
        notes = self.folder / "asked"
        asked = notes.read_text().split() if notes.exists() else []
        notes.unlink(missing_ok=True)
        return done.returncode, asked


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path / "clone")


def test_made_once_and_then_found(clone):
    assert "make horovod" in why_not("horovod", clone.folder)
    assert clone.make() == (0, ["venv", "packages", "compile"])
    assert not why_not("horovod", clone.folder)
    # For gloo alone, whatever the shell has set.
    switches = (clone.folder / "switches").read_text()
    assert "HOROVOD_WITHOUT_MPI=1" in switches
    assert "HOROVOD_WITH_MPI" not in switches
    # PyTorch knows no CUDA here; the file in uv's cache is as it was.
    (version,) = (clone.folder / ".venv-horovod").glob("lib/*/site-packages/torch/version.py")
    assert version.read_text() == "cuda = None\nhip = None\n"
    assert "11.7" in (clone.folder / "version.py").read_text()
    assert clone.make() == (0, [])
    assert clone.make("tensorflow") == (0, ["venv", "packages"])


@pytest.mark.parametrize("step", ["packages", "compile", "try"])
def test_what_failed_is_not_called_ready_and_the_next_call_begins_anew(step, clone):
    assert clone.make(fails=step)[0] == 1
    assert why_not("horovod", clone.folder)
    assert clone.make() == (0, ["venv", "packages", "compile"])
    assert why_not("horovod", clone.folder) == ""
