"""The processes that a command of TensorFlow's scripts starts: they end together."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import session_of, wait_until

sys.path.append(str(Path(__file__).resolve().parents[2] / "tools"))
from elsewhere import SCRIPTS

# The processes alone, which need not load TensorFlow.
SCRIPT = """
import json, os, time, tensorflow_processes
processes = tensorflow_processes.start(chief=1, ps=1, worker=2)
task = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
if task == os.environ["RAISES"]:
    raise ValueError(task)
time.sleep(600)
"""


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, "chief", "worker"])
def test_all_end_with_the_first_or_when_one_raises(end, tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": str(SCRIPTS), "RAISES": str(end)}
    words = [sys.executable, tmp_path / "script.py"]
    process = subprocess.Popen(words, env=env, start_new_session=True, stderr=subprocess.PIPE)
    try:
        if isinstance(end, signal.Signals):
            assert wait_until(lambda: len(session_of(process.pid)) == 4, 60)
            process.send_signal(end)
        said = process.communicate(timeout=60)[1].decode()
        assert wait_until(lambda: not session_of(process.pid), 60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if isinstance(end, signal.Signals):
        assert (process.returncode, said) == (-end, "")
    else:
        assert process.returncode == 1
        assert f"ValueError: {end}" in said
