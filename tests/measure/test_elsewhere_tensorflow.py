"""TensorFlow's asynchronous server on the experiment, and the processes that a command starts."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from ranks import is_alive, session_of, wait_until
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


@pytest.fixture
def start(tmp_path):
    """Start a script with a server and two workers, which then do what is asked of each."""
    started = []

    def start(first="time.sleep(600)", others="processes.finish()"):
        script = tmp_path / "script.py"
        text = f"""
            import json, os, signal, sys, time
            import tensorflow_processes
            processes = tensorflow_processes.start(chief=1, ps=1, worker=2)
            config = json.loads(os.environ["TF_CONFIG"])
            task = config["task"]
            if task["type"] == "chief":
                {first}
            else:
                {others}
            processes.finish()
            """
        script.write_text(textwrap.dedent(text))
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        env = os.environ | {"PYTHONPATH": str(SCRIPTS)}
        process = subprocess.Popen(
            [sys.executable, script], env=env, start_new_session=True, **pipes
        )
        started.append(process)
        return process

    yield start
    for process in started:
        for pid in session_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()


def ended(process):
    """Wait until it has ended with all its copies: the exit code and what it has printed."""
    out, err = process.communicate(timeout=60)
    assert wait_until(lambda: not session_of(process.pid), 60)
    return process.returncode, out, err


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGINT])
def test_all_end_with_the_first_however_it_ends(start, sign):
    process = start(others="time.sleep(600)")
    assert wait_until(lambda: len(session_of(process.pid)) == 4, 60)
    copies = session_of(process.pid)
    process.send_signal(sign)
    assert ended(process) == (-sign, "", "")
    assert not any(map(is_alive, copies))


@pytest.mark.parametrize("who", ["first", "others"])
def test_all_end_when_one_raises(start, who):
    code, _, err = ended(start(**{who: "raise ValueError(task)"}))
    assert code == 1
    assert "ValueError: {'type':" in err
