"""TensorFlow's asynchronous server on the experiment, and the processes that a command starts."""

import contextlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from ranks import session_of, wait_until
from torch.nn.functional import cross_entropy

from workbook.measure.environments import REPOSITORY, environment_of, why_not

sys.path.append(str(REPOSITORY / "tools"))
from elsewhere import SCRIPTS, initial_model, prepare

STEPS = 8


@pytest.mark.skipif(bool(why_not("tensorflow")), reason=why_not("tensorflow") or "is here")
@pytest.mark.slow
def test_an_asynchronous_parameter_server_counts_its_staleness(tmp_path):
    prepare(tmp_path, STEPS)
    words = [
        environment_of("tensorflow") / "bin/python",
        tmp_path / "parameter_server.py",
        "--asynchronous",
    ]
    files = ["--experiment", tmp_path / "experiment.npz", "--report", tmp_path / "report.json"]
    subprocess.run([*words, *files], check=True, timeout=300, env=os.environ | {"PYTHONPATH": ""})
    report = json.loads((tmp_path / "report.json").read_text())
    updates = 2 * STEPS
    assert len(report["losses"]) == len(report["staleness"]) == updates
    # An update comes between the reading and the update of the other worker at most once.
    assert 0 <= sum(report["staleness"]) < updates
    # Whichever share came first was computed with the initial weights.
    with np.load(tmp_path / "experiment.npz") as file:
        batches = zip(*(map(torch.from_numpy, file[name]) for name in ("images", "labels")))
    halves = [half for batch in batches for half in zip(*(part.chunk(2) for part in batch))]
    model = initial_model()
    initial = [cross_entropy(model(images), labels).item() for images, labels in halves]
    assert min(np.abs(np.subtract(report["losses"], initial))) < 1e-5


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
