"""Whether a process lives, as the system says."""

import subprocess
import sys
from pathlib import Path

import pytest
from ranks import wait_until

from labkit.comm.processes import is_running


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_one_that_lives_and_ends(child):
    assert is_running(child.pid)
    child.kill()
    # Nobody has waited for it yet.
    assert wait_until(lambda: not is_running(child.pid), 5)
    child.wait()
    assert not is_running(child.pid)


def test_a_name_in_brackets_does_not_confuse():
    code = "import pathlib, time; pathlib.Path('/proc/self/comm').write_text('a) Z (b'); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    try:
        comm = Path(f"/proc/{process.pid}/comm")
        assert wait_until(lambda: comm.read_text().startswith("a) Z"), 10)
        assert is_running(process.pid)
    finally:
        process.communicate(b"\n")
