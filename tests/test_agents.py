"""Agents of ``torchrun`` that play hosts: their numbers and output, and that nothing is left."""

import contextlib
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from ranks import wait_until

from labkit.engine.comm.shared_memory import marked
from workbook.agents import start_agents

pytestmark = pytest.mark.fresh

# Ranks without torch, so that they start at once. The agents have to import it.
TELL = """
import os, sys, time
print(*(os.environ[name] for name in ("GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE")), flush=True)
print("to stderr", sys.argv[1], file=sys.stderr)
has_told = os.path.join(os.path.dirname(__file__), "told")
if os.environ["RANK"] == "3":
    open(has_told, "w").close()
while os.environ["RANK"] == "2":
    if os.path.exists(has_told):  # or its agent would end rank 3 before it has told
        sys.exit(3)
    time.sleep(0.05)
time.sleep(600)
"""
CALL = """
import os, sys
from workbook.agents import start_agents
with start_agents([sys.argv[1], "word"], hosts=1, ranks_per_host=1) as agents:
    agents.follow(600)
"""


def test_hosts_are_numbered_and_one_of_them_fails(tmp_path):
    program = tmp_path / "tell.py"
    program.write_text(TELL)
    lines = []
    with start_agents([program, "word"], hosts=2, ranks_per_host=2) as agents:
        (folder,) = (path for path in os.scandir(os.environ["TMPDIR"]) if "hosts" in path.name)

        def fails():
            agents.follow(0.5, show=lambda *line: lines.append(line))
            return any(host == 1 and "exitcode  : 3" in line for host, line in lines)

        # Host 0 does not know of it, and would go on forever.
        assert wait_until(fails, 60)
    for rank in range(4):
        assert (rank // 2, f"rank {rank}: {rank // 2} {rank % 2} 4") in lines
        assert (rank // 2, f"rank {rank}: to stderr word") in lines
    assert nothing_is_left(Path(folder.path))


def marks(folder):
    return marked("LABKIT_AGENTS_FOLDER", folder)


def nothing_is_left(folder):
    return not marks(str(folder)) and not folder.exists()


def test_nothing_is_left_of_a_caller_that_was_interrupted_or_killed(tmp_path):
    program = tmp_path / "tell.py"
    program.write_text(TELL)
    callers, signals = [], (signal.SIGINT, signal.SIGKILL)
    for name in ("interrupted", "killed"):
        (tmp_path / name).mkdir()
        settings = os.environ | {"TMPDIR": str(tmp_path / name)}
        words = [sys.executable, "-c", CALL, str(program)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        callers.append(subprocess.Popen(words, env=settings, **pipes))
    try:
        for caller, ending, name in zip(callers, signals, ("interrupted", "killed")):
            lines = {caller.stdout.readline() for _ in range(2)}
            assert lines == {"host 0 | rank 0: 0 0 1\n", "host 0 | rank 0: to stderr word\n"}
            (folder,) = (tmp_path / name).iterdir()
            assert len(marks(str(folder))) == 2
            caller.send_signal(ending)
            assert wait_until(partial(nothing_is_left, folder), 30)
            caller.wait(30)
        assert "KeyboardInterrupt" in callers[0].communicate()[1]
    finally:
        for caller in callers:
            caller.kill()
            caller.communicate()
        for pid in (pid for folder in tmp_path.glob("*/*") for pid in marks(str(folder))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
