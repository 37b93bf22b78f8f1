"""TensorFlow's strategies on the experiment, and the processes that one command starts."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import is_alive, session_of, wait_until
from torch.nn.functional import cross_entropy

from workbook.measure.elsewhere.environments import python_of, why_not
from workbook.measure.elsewhere.turns import LR, MOMENTUM, SCRIPTS, initial_model, prepare

STEPS = 8
PARAMETER_BYTES = 4 * sum(p.numel() for p in initial_model().parameters())
# What comes on top of tensors: gRPC, names of operations, images and labels.
OVERHEAD = 1.1
needs_tensorflow = pytest.mark.skipif(
    python_of("tensorflow") is None, reason=why_not("tensorflow") or "TensorFlow is here"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    prepare(folder, STEPS)
    return folder


@pytest.fixture(scope="module")
def batches(place):
    with np.load(place / "experiment.npz") as file:
        return list(zip(*(map(torch.from_numpy, file[name]) for name in ("images", "labels"))))


@pytest.fixture(scope="module")
def one_device(batches):
    """The losses of PyTorch on the whole batches."""
    model, losses = initial_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    for images, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def command(place, script, *options):
    python = python_of("tensorflow")
    files = ["--experiment", place / "experiment.npz", "--report", place / f"{script}.json"]
    return [python, place / script, *files, *options]


def report_of(place, script, *options):
    """Run a script, which prints nothing: the reports of its workers."""
    folder = place / "home"
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        command(place, script, *options),
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": "", "HOME": str(folder), "TMPDIR": str(folder)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert [*folder.iterdir()] == []  # neither settings nor temporary files
    found = {path: json.loads(path.read_text()) for path in place.glob(f"{script}.json*")}
    return [report for _, report in sorted(found.items())]


def after_warm_up(report):
    return {name: each[2:] for name, each in report["sent_bytes"].items()}


@needs_tensorflow
@pytest.mark.slow
def test_mirrored_replicas_stay_equal_and_follow_one_device_without_a_socket(place, one_device):
    (report,) = report_of(place, "mirrored.py")
    assert report["losses"] == pytest.approx(one_device, abs=1e-5)
    first, second = report["weights_sha256"]
    assert first == second
    assert report["sent_bytes"] == {"worker 0": [0] * STEPS}
    assert len(report["step_s"]) == STEPS


@needs_tensorflow
@pytest.mark.slow
def test_both_workers_follow_one_device_and_send_what_a_ring_sends(place, one_device):
    reports = report_of(place, "multi_worker.py")
    assert [report["worker"] for report in reports] == [0, 1]
    (first,), (second,) = (report["weights_sha256"] for report in reports)
    assert first == second
    for report in reports:
        assert report["losses"] == pytest.approx(one_device, abs=1e-5)
        (sent,) = after_warm_up(report).values()
        # 2 (P - 1) / P of the gradients is all of them, for two workers.
        assert PARAMETER_BYTES < min(sent) <= max(sent) < OVERHEAD * PARAMETER_BYTES


@needs_tensorflow
@pytest.mark.slow
def test_a_parameter_server_in_lockstep_follows_one_device(place, one_device):
    (report,) = report_of(place, "parameter_server.py")
    assert report["losses"] == pytest.approx(one_device, abs=1e-5)
    sent = after_warm_up(report)
    assert set(sent) == {"coordinator", "server", "worker 0", "worker 1"}
    # TensorFlow decides which of the two computes a share.
    both = [sum(each) for each in zip(sent["worker 0"], sent["worker 1"])]
    for each in (both, sent["server"]):
        assert 2 * PARAMETER_BYTES < min(each) <= max(each) < 2 * OVERHEAD * PARAMETER_BYTES


@needs_tensorflow
@pytest.mark.slow
def test_an_asynchronous_parameter_server_counts_its_staleness(place, batches):
    (report,) = report_of(place, "parameter_server.py", "--asynchronous")
    updates = 2 * STEPS
    assert len(report["losses"]) == len(report["staleness"]) == updates
    assert all(0 <= stale < updates for stale in report["staleness"])
    # An update comes between the reading and the update of the other worker at most once.
    assert sum(report["staleness"]) < updates
    # Whichever share came first was computed with the initial weights.
    halves = [half for batch in batches for half in zip(*(part.chunk(2) for part in batch))]
    model = initial_model()
    initial = [cross_entropy(model(images), labels).item() for images, labels in halves]
    assert min(np.abs(np.subtract(report["losses"], initial))) < 1e-5
    # It sends the weights once for each update.
    (sent,) = report["sent_bytes"]["server"]
    assert updates * PARAMETER_BYTES < sent < OVERHEAD * updates * PARAMETER_BYTES


@needs_tensorflow
@pytest.mark.slow
def test_nothing_is_left_when_the_coordinator_is_killed_while_it_trains(tmp_path):
    place = tmp_path
    prepare(place, steps=1000)
    words = command(place, "parameter_server.py")
    settings = {**os.environ, "PYTHONPATH": ""}
    with subprocess.Popen(words, env=settings, start_new_session=True) as first:
        others = copies_of(first, 3)
        assert wait_until(lambda: all(map(is_connected, others)), 200)
        assert first.poll() is None
        first.kill()
    assert wait_until(lambda: not any(map(is_alive, others)), 60)
    assert not list(tmp_path.glob("*.json*"))


# The processes alone, which need not load TensorFlow.


class Started:
    """A script that starts a server and two workers, and then does what is asked of each."""

    def __init__(self, folder, first="time.sleep(600)", others="processes.finish()"):
        script = folder / "script.py"
        script.write_text(
            textwrap.dedent(f"""
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
            """)
        )
        self.process = subprocess.Popen(
            [sys.executable, script],
            env={**os.environ, "PYTHONPATH": str(SCRIPTS)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self):
        """Leave nothing, however the test went."""
        for pid in session_of(self.process.pid):
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()

    def ended(self):
        """Wait until it has ended with all its copies: the exit code and what it has printed."""
        out, err = self.process.communicate(timeout=60)
        assert wait_until(lambda: not session_of(self.process.pid), 60)
        return self.process.returncode, out, err


@pytest.fixture
def start(tmp_path):
    started = []

    def start(**doing):
        started.append(Started(tmp_path, **doing))
        return started[-1]

    yield start
    for each in started:
        each.end()


def copies_of(first, count):
    """The other processes of a script that was started in a session of its own, in order."""

    def copies():
        return sorted({*session_of(first.pid)} - {first.pid})

    assert wait_until(lambda: len(copies()) == count or first.poll() is not None, 200)
    return copies()


def is_connected(pid):
    """Whether this process has a TCP connection."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    established = "01"
    return any(row[9] in inodes for row in rows if row[3] == established)


def test_all_processes_of_a_cluster_find_each_other_and_end_together(start):
    tell = "print(json.dumps([config, processes.sent_bytes()]), flush=True)"
    code, out, err = start(first=tell).ended()
    assert (code, err) == (0, "")
    config, sent = json.loads(out)
    assert {job: len(at) for job, at in config["cluster"].items()} == {
        "chief": 1,
        "ps": 1,
        "worker": 2,
    }
    addresses = [address for at in config["cluster"].values() for address in at]
    assert len(set(addresses)) == 4
    assert sent == {"coordinator": 0, "server": 0, "worker 0": 0, "worker 1": 0}


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_all_end_with_the_first_however_it_ends(start, sign):
    started = start(others="time.sleep(600)")
    copies_of(started.process, 3)
    started.process.send_signal(sign)
    code, out, err = started.ended()
    assert (code, out, err) == (-sign, "", "")


def test_a_copy_that_stands_still_keeps_no_other(start):
    started = start(others="print(flush=True); time.sleep(600)")
    for _ in range(3):
        started.process.stdout.readline()  # they have started
    *others, last = copies_of(started.process, 3)
    os.kill(last, signal.SIGSTOP)
    started.process.kill()
    assert wait_until(lambda: not any(map(is_alive, others)), 60)
    os.kill(last, signal.SIGCONT)
    started.ended()


def test_an_interrupt_from_the_terminal_ends_all_silently(start):
    started = start(others="time.sleep(600)")
    copies_of(started.process, 3)
    os.killpg(started.process.pid, signal.SIGINT)
    _, out, err = started.ended()
    assert (out, "Traceback" in err) == ("", False)


@pytest.mark.parametrize("first", ["time.sleep(600)", "while True: processes.sent_bytes()", ""])
def test_all_end_when_another_process_is_killed(start, first):
    die = 'os.kill(os.getpid(), signal.SIGKILL) if task["type"] == "ps" else processes.finish()'
    code, out, err = start(first=first or "pass", others=die).ended()
    assert (code, out) == (1, "")
    assert err == "server ended with -9: all processes end\n"


@pytest.mark.parametrize("who", ["first", "others"])
def test_all_end_when_one_raises(start, who):
    code, out, err = start(**{who: "raise ValueError(task)"}).ended()
    assert (code, out) == (1, "")
    assert "ValueError: {'type':" in err


def test_a_reserved_port_is_given_to_nobody_else_but_can_be_bound(start):
    use = """
                import socket
                host, port = config["cluster"]["chief"][0].split(":")
                others = [socket.create_server((host, 0)) for _ in range(100)]
                own = socket.socket()
                own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                own.bind(("", int(port)))
                own.listen()
                link = socket.create_connection((host, int(port)))
                link.sendall(bytes(1000))
                print(int(port) in [o.getsockname()[1] for o in others], flush=True)
                print(processes.sent_bytes()["coordinator"], flush=True)
    """
    assert start(first=use.strip()).ended() == (0, "False\n1000\n", "")
