"""The one run of all frameworks: what it counts, what it says of who fails, what it leaves."""

import io
import json
import os
import signal
import socket
import sys
import textwrap
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import is_alive, wait_until

from workbook.measure import elsewhere, processes
from workbook.measure.elsewhere import digits, scripts
from workbook.measure.elsewhere.contenders import CONTENDERS, ONE_DEVICE, Contender
from workbook.measure.elsewhere.measure import choose, measure
from workbook.measure.elsewhere.result import formula_bytes
from workbook.measure.elsewhere.turn import Turn, TurnError, reason_in

ROOT = Path(__file__).resolve().parents[2]
# 2 (P - 1) / P x 4 bytes x 29,066 parameters, with P = 2.
ALL_REDUCE_BYTES = 116_264
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")


@pytest.fixture
def module():
    """``experiment.py`` as a script sees it, with nothing counted yet."""
    return digits.module_of(digits.SCRIPTS)


@pytest.fixture
def experiment(module, tmp_path):
    path = tmp_path / "experiment.npz"
    path.write_bytes(digits.experiment_file(steps=3))
    return module.Experiment.load(path)


class TestTheExperiment:
    @pytest.mark.parametrize("size", [1, 2, 4, 64])
    def test_the_shares_add_up_to_the_batch(self, experiment, size):
        for step in range(3):
            parts = [experiment.share(rank, size, step) for rank in range(size)]
            images, labels = map(np.concatenate, zip(*parts))
            assert (images == experiment.images[step]).all()
            assert (labels == experiment.labels[step]).all()

    def test_unequal_shares_are_refused(self, experiment):
        with pytest.raises(ValueError, match="64 in 3 parts"):
            experiment.share(0, 3, 0)

    def test_it_is_the_course_s_model_on_the_shipped_digits(self, experiment):
        model = digits.initial_model()
        state = model.state_dict()
        assert list(experiment.weights) == list(state)
        for name, value in experiment.weights.items():
            assert value.dtype == np.float32
            assert (value == state[name].numpy()).all()
        assert experiment.images.shape == (3, 64, 1, 8, 8)
        assert experiment.images.dtype == np.float32
        assert experiment.labels.dtype == np.int64
        assert len(np.unique(experiment.images.reshape(192, -1), axis=0)) > 180
        assert (experiment.steps, experiment.lr, experiment.momentum) == (3, 0.05, 0.9)

    def test_more_steps_begin_with_the_same_ones_and_another_seed_with_others(self):
        def images(*settings):
            with np.load(io.BytesIO(digits.experiment_file(*settings))) as file:
                return file["images"]

        assert (images(25)[:3] == images(3)).all()
        assert (images(3) != images(3, 1)).any()

    def test_the_script_on_our_ring_differs_in_one_line(self, tmp_path):
        theirs = (digits.SCRIPTS / digits.HOROVOD_SCRIPT).read_text().splitlines()
        place = digits.prepare(tmp_path, steps=1)
        ours = place.script(digits.OUR_SCRIPT).read_text().splitlines()
        (changed,) = [pair for pair in zip(theirs, ours, strict=True) if pair[0] != pair[1]]
        assert changed == ("import horovod.torch as hvd", "import labkit.horovod as hvd")
        with pytest.raises(ValueError, match="2 lines"):
            digits.with_our_import(f"{digits.THEIR_IMPORT}\n" * 2)

    def test_without_the_scripts_it_says_so(self, tmp_path):
        with pytest.raises(ValueError, match=r"no experiment\.py in .*: run this in a clone"):
            digits.prepare(tmp_path, 1, scripts=tmp_path)


def connection(family=socket.AF_INET):
    """Both ends of a TCP connection."""
    address = ("127.0.0.1", 0) if family == socket.AF_INET else ("::1", 0)
    with socket.create_server(address, family=family) as server:
        near = socket.create_connection(server.getsockname()[:2])
        return near, server.accept()[0]


@linux_only
class TestSentBytes:
    def test_both_ends_of_a_connection_in_this_process(self, module):
        near, far = connection()
        with near, far:
            before = module.sent_bytes()
            near.sendall(b"x" * 1000)
            far.sendall(b"y" * 77)
            assert module.sent_bytes() - before == 1077

    def test_bytes_that_nobody_has_received_yet_count(self, module):
        near, far = connection()
        with near, far:
            before = module.sent_bytes()
            near.setblocking(False)
            written = near.send(b"x" * 10_000_000)
            assert module.sent_bytes() - before == written

    def test_a_socket_that_is_closed_takes_no_bytes_with_it(self, module):
        near, far = connection()
        near.sendall(b"x" * 1000)
        before = module.sent_bytes()
        near.close()
        far.close()
        assert module.sent_bytes() == before
        # A new one may get the old one's descriptors.
        near, far = connection()
        with near, far:
            near.sendall(b"x" * 5)
            assert module.sent_bytes() - before == 5

    def test_a_copy_of_a_socket_counts_once_and_other_sockets_do_not(self, module):
        near, far = connection()
        one, other = socket.socketpair()
        with near, far, one, other, near.dup():
            before = module.sent_bytes()
            near.sendall(b"x" * 10)
            one.sendall(b"x" * 1000)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
                datagrams.bind(("127.0.0.1", 0))
                datagrams.sendto(b"x" * 100, datagrams.getsockname())
                assert module.sent_bytes() - before == 10

    def test_over_ipv6(self, module):
        try:
            near, far = connection(socket.AF_INET6)
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
        with near, far:
            before = module.sent_bytes()
            near.sendall(b"x" * 10)
            assert module.sent_bytes() - before == 10

    def test_sockets_and_files_that_come_and_go_meanwhile(self, module):
        near, far = connection()
        stop = threading.Event()

        def open_and_close():
            while not stop.is_set():
                for each in (*connection(), *map(open, [os.devnull] * 3)):
                    each.close()

        threads = [threading.Thread(target=open_and_close) for _ in range(2)]
        with near, far:
            before = module.sent_bytes()
            for thread in threads:
                thread.start()
            try:
                for number in range(1, 200):
                    near.sendall(b"x")
                    assert module.sent_bytes() - before == number
            finally:
                stop.set()
                for thread in threads:
                    thread.join()

    def test_a_kernel_that_does_not_count_is_named(self, module, monkeypatch):
        class Old(socket.socket):
            def getsockopt(self, *what):
                return super().getsockopt(*what)[:200]

        near, far = connection()
        with near, far:
            monkeypatch.setattr(socket, "socket", Old)
            with pytest.raises(OSError, match=r"use Linux 4\.19"):
                module.sent_bytes()

    def test_each_step_gets_its_own(self, module):
        near, far = connection()
        with near, far:
            measured = module.Measured()
            for count in (3, 5):
                near.sendall(b"outside")
                with measured:
                    near.sendall(b"x" * count)
        assert measured.sent_bytes == [3, 5]
        assert all(seconds > 0 for seconds in measured.step_s)


def test_a_report_is_written_by_each_worker_and_whole(module, tmp_path):
    told = {"losses": [torch.tensor(1.5)], "step_s": [0.1], "versions": {"torch": "2"}}
    module.report(tmp_path / "r", sent_bytes=[np.int64(3)], **told)
    module.report(tmp_path / "r", sent_bytes=[4], worker=1, **told)
    module.report(tmp_path / "r", sent_bytes={"chief": [5], "worker 2": [6]}, worker=2, **told)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r", "r.1", "r.2"]
    reports = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
    turn = Turn.of(reports, steps=1)
    assert turn.losses == [1.5]
    assert turn.sent_bytes == {"worker 0": [3], "worker 1": [4], "chief": [5], "worker 2": [6]}
    assert turn.counted_bytes is None
    with pytest.raises(TurnError, match="losses: 1 numbers for 2 steps"):
        Turn.of(reports, steps=2)
    with pytest.raises(TurnError, match="worker 0 has not reported"):
        Turn.of(reports and [each for each in reports if each["worker"]], steps=1)


# Contenders without a framework: what they report is written down.
SCRIPT = """
    import os, signal, subprocess, sys, time
    from experiment import Experiment, report

    told = dict(zip(sys.argv[1::2], sys.argv[2::2]))
    steps = Experiment.load(told["--experiment"]).steps
    losses = [2.0, 1.0, 0.5, 0.25][:steps]
    {body}
    report(told["--report"], losses=losses, step_s=[0.25, 0.1, 0.1, 0.3], versions={{}},
           sent_bytes=[9, 9, 10, 20])
"""
BODIES = {
    "right": "pass",
    "dies": "raise ValueError('no such tensor')",
    "is killed": "os.kill(os.getpid(), signal.SIGKILL)",
    "lies": "losses[2] += 0.125",
    "lies a little": "losses[1] += 2e-5",
    "is not a number": "losses[3] = float('nan')",
    "tells too little": "losses.pop()",
    "says nothing": "sys.exit()",
    "ends half way": "open(told['--report'], 'w').write('{'), sys.exit()",
}

# Before it imports anything that takes a while to load.
HANGS = """
    import os, signal, subprocess, time

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    open(os.environ["PIDS"], "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(1000)
"""


def here(folder):
    return [sys.executable]


def of_script(name, **settings):
    take = partial(scripts.turn, script=f"{name}.py", launch=here)
    return Contender(take, messages="TCP", formula="all-reduce", **settings)


def fake_turn(place, steps, limit_s):
    """One device's turn without a process."""
    return Turn([2.0, 1.0, 0.5, 0.25], [0.1] * 4, {"worker 0": [0] * 4})


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A folder with the scripts above."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "experiment.py").write_text((digits.SCRIPTS / "experiment.py").read_text())
    for name, body in BODIES.items():
        text = textwrap.dedent(SCRIPT).format(body=textwrap.dedent(body).strip("\n"))
        (folder / f"{name}.py").write_text(text)
    (folder / "hangs.py").write_text(textwrap.dedent(HANGS))
    monkeypatch.setattr(processes, "_GRACE_S", 0.2)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    yield folder
    assert list((tmp_path / "scratch").iterdir()) == []


class TestWhoFails:
    def test_the_row_says_so_and_the_others_train_on(self, written):
        names = [name for name in BODIES if name != "right"]
        told = []
        result = measure(
            {ONE_DEVICE: of_script("right")} | {name: of_script(name) for name in names},
            *(4, 2),
            scripts=written,
            tell=lambda number, name: told.append((number, name)),
        )
        rows = {row["contender"]: row for row in result.record()["contenders"]}
        problems = {name: row["problem"] for name, row in rows.items() if row["problem"]}
        assert problems == {
            "dies": "ended with 1: ValueError: no such tensor",
            "is killed": "ended with -9: without a word",
            "tells too little": "losses: 3 numbers for 4 steps",
            "says nothing": "worker 0 has not reported",
            "ends half way": problems["ends half way"],
        }
        assert problems["ends half way"].startswith("report.json is not a report: ")
        assert all("losses" not in rows[name] for name in problems)
        # Out of the second round are those that have failed; it begins with another contender.
        second = [name for number, name in told if number == 2]
        assert second == ["lies", "lies a little", "is not a number", ONE_DEVICE]
        assert {name: row["agrees"] for name, row in rows.items() if "agrees" in row} == {
            ONE_DEVICE: True,
            "lies": False,
            "lies a little": False,
            "is not a number": False,
        }
        assert rows["lies"]["difference"] == 0.125
        text = str(result)
        assert "1.2e-01: wrong, more than 1e-05" in text
        assert "not a number" in text
        assert "dies: ended with 1: ValueError: no such tensor." in text
        caption = result.figures()["elsewhere"].caption
        assert caption.startswith("Not all lines lie on each other: from one device differs lies")

    def test_who_hangs_is_ended_with_all_that_it_has_started(self, written, tmp_path):
        contenders = {ONE_DEVICE: Contender(fake_turn), "hangs": of_script("hangs")}
        result = measure(contenders, 4, 2, limit_s=5, scripts=written)
        pids = (tmp_path / "pids").read_text().split()
        assert len(pids) == 2
        for pid in pids:
            assert wait_until(lambda pid=pid: not is_alive(int(pid)), 10)
        assert result.record()["contenders"][1]["problem"] == "not done after 5 s, and so ended"

    def test_seconds_and_bytes_of_the_first_steps_do_not_count(self, written):
        contenders = {ONE_DEVICE: of_script("right")}
        (row,) = measure(contenders, 4, 2, scripts=written).record()["contenders"]
        assert row["seconds"] == [0.1, 0.3] * 2
        assert row["step_s"]["median"] == pytest.approx(0.2)
        assert row["sent_bytes"] == {"worker 0": 15}
        assert row["difference"] == 0

    def test_without_one_device_nothing_can_agree(self, written):
        contenders = {ONE_DEVICE: of_script("dies"), "right": of_script("right")}
        result = measure(contenders, 4, 1, scripts=written)
        row = result.record()["contenders"][1]
        assert (row["difference"], row["agrees"]) == (None, False)

    def test_who_is_not_here_says_what_to_do(self, written, monkeypatch):
        why = "tensorflow needs an environment of its own: make tensorflow"
        monkeypatch.setattr("workbook.measure.elsewhere.contenders.why_not", lambda name: why)
        absent = of_script("right", environment="tensorflow")
        contenders = {ONE_DEVICE: Contender(fake_turn), "right": absent}
        result = measure(contenders, 4, 1, scripts=written)
        assert result.record()["contenders"][1]["absent"]
        assert f"right: {why}." in str(result)

    def test_stopped_it_leaves_no_process_and_no_file(self, written, tmp_path):
        pids = tmp_path / "pids"

        def stop():
            assert wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2, 60)
            if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:
                os.kill(os.getpid(), signal.SIGTERM)

        before = signal.getsignal(signal.SIGTERM)
        thread = threading.Thread(target=stop)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            measure({ONE_DEVICE: of_script("hangs")}, 4, 1, limit_s=70, scripts=written)
        thread.join()
        assert signal.getsignal(signal.SIGTERM) is before
        for pid in pids.read_text().split():
            assert wait_until(lambda pid=pid: not is_alive(int(pid)), 10)

    @pytest.mark.parametrize(
        ("log", "reason"),
        [
            ("", "without a word"),
            ("====\n", "without a word"),
            ("loading\nout of memory\n----", "out of memory"),
            ("Traceback (most recent call last):\nKeyError: 'a'\n", "KeyError: 'a'"),
            (
                "[rank0]: a.OutOfMemoryError: much\nChildFailedError:\n==",
                "a.OutOfMemoryError: much",
            ),
            ("python: can't open file 'a.py': [Err 2]\n===", "can't open file 'a.py': [Err 2]"),
        ],
    )
    def test_the_line_that_says_most(self, log, reason):
        assert reason_in(log) == reason


@pytest.fixture(scope="module")
def rows():
    names = ["labkit ddp", "labkit parameter_server over TCP"]
    names += ["labkit ring_all_reduce over TCP", "PyTorch DDP"]
    record = elsewhere.run_elsewhere(names, steps=3).record()
    return {row["contender"]: row for row in record["contenders"]}


class TestOurs:
    """labkit's own techniques and PyTorch's DDP, on three steps."""

    def test_all_losses_are_those_of_one_device(self, rows):
        assert len(rows) == 5
        for name, row in rows.items():
            assert not row["problem"], name
            assert row["agrees"], (name, row["difference"])
            assert row["difference"] <= 1e-5
            assert len(row["losses"]) == 3
        assert rows[ONE_DEVICE]["losses"] == pytest.approx(one_device_losses(3), abs=1e-6)

    def test_labkit_counts_what_the_formula_says_and_the_kernel_a_little_more(self, rows):
        worker = rows["labkit ring_all_reduce over TCP"]
        counted, kernel = worker["counted_bytes"], worker["sent_bytes"]
        assert counted == {"worker 0": ALL_REDUCE_BYTES, "worker 1": ALL_REDUCE_BYTES}
        for name, num_bytes in kernel.items():
            assert counted[name] < num_bytes < 1.01 * counted[name]
        server = rows["labkit parameter_server over TCP"]
        assert server["counted_bytes"] == {
            "server": 2 * ALL_REDUCE_BYTES,
            "worker 0": ALL_REDUCE_BYTES,
            "worker 1": ALL_REDUCE_BYTES,
        }
        for name, num_bytes in server["sent_bytes"].items():
            assert server["counted_bytes"][name] < num_bytes < 1.01 * server["counted_bytes"][name]

    def test_in_shared_memory_the_kernel_sees_nothing(self, rows):
        assert sum(rows["labkit ddp"]["sent_bytes"].values()) == 0
        assert rows["labkit ddp"]["counted_bytes"]["worker 0"] == ALL_REDUCE_BYTES

    def test_pytorch_sends_as_much_as_the_formula_and_headers(self, rows):
        for num_bytes in rows["PyTorch DDP"]["sent_bytes"].values():
            assert ALL_REDUCE_BYTES < num_bytes < 1.01 * ALL_REDUCE_BYTES
        assert rows["PyTorch DDP"]["counted_bytes"] == {}
        assert rows["PyTorch DDP"]["versions"] == {"torch": torch.__version__}


def one_device_losses(steps):
    """The same training, written out."""
    with np.load(io.BytesIO(digits.experiment_file(steps))) as file:
        images, labels = torch.from_numpy(file["images"]), torch.from_numpy(file["labels"])
    model, losses = digits.initial_model(), []
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    for inputs, targets in zip(images, labels):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        losses.append(loss.item())
        with torch.no_grad():
            for p, v, g in zip(model.parameters(), velocity, gradients):
                p -= 0.05 * v.mul_(0.9).add_(g)
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, one in CONTENDERS.items() if one.environment] + ["labkit.horovod"]
)
def test_the_other_frameworks_agree(name):
    if missing := CONTENDERS[name].why_not():
        pytest.skip(missing)
    _, row = elsewhere.run_elsewhere([name], steps=4).record()["contenders"]
    assert not row["problem"]
    assert row["agrees"], row["difference"]


def test_formulas():
    assert formula_bytes("all-reduce") == {"worker": ALL_REDUCE_BYTES}
    server = {"worker": ALL_REDUCE_BYTES, "server": 2 * ALL_REDUCE_BYTES}
    assert formula_bytes("server") == server
    assert formula_bytes("") == {}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--contenders", "Horovot"], "unknown contender 'Horovot'"),
        (["--steps", "0"], "steps must be"),
        (["--repeats", "0"], "repeats must be"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(words, named, refused):
    assert named in refused("bench", "elsewhere", *words)


def test_one_device_is_always_among_the_chosen_and_first():
    assert list(choose(["Horovod", "PyTorch DDP"])) == [ONE_DEVICE, "PyTorch DDP", "Horovod"]
    assert list(choose([])) == [ONE_DEVICE]
    assert choose(None) == CONTENDERS


def row(name, **changes):
    losses, spread = [2.5, 2.0, 1.5], {"median": 0.01, "low": 0.008, "high": 0.02}
    return {
        "contender": name,
        "framework": "Horovod",
        "messages": "TCP",
        "problem": "",
        "absent": False,
        "losses": losses,
        "tolerance": 1e-5,
        "difference": 2.4e-7,
        "agrees": True,
        "sent_bytes": {"worker 0": 117_000.0, "worker 1": 118_000.0},
        "counted_bytes": {},
        "formula_bytes": {"worker": ALL_REDUCE_BYTES},
        "seconds": [0.01],
        "step_s": spread,
        "versions": {"horovod": "0.28.1"},
    } | changes


class TestARecord:
    def test_its_table(self):
        sent = {"chief": 5.0, "server 0": 7.0, "worker 0": 2.0, "worker 1": 4.0}
        record = {"contenders": [row("A"), row("B", sent_bytes=sent, difference=0)]}
        table = elsewhere.elsewhere_table(record)
        assert table.rows == (
            ("A", "2 workers", "TCP", "2.4e-07", "117,500 B", "", "116,264 B",
             "10 ms (8 ms to 20 ms)"),
            ("B", "1 chief, 1 server, 2 workers", "TCP", "0",
             "worker 3 B, server 7 B, chief 5 B", "", "116,264 B", "10 ms (8 ms to 20 ms)"),
        )  # fmt: skip
        assert table.notes == ("horovod 0.28.1: A, B.",)
        assert "horovod 0.28.1: A, B." in table._repr_html_()
        losses = elsewhere.losses_table(record, steps=2)
        assert losses.rows == (("A", "2.500000", "2.000000"), ("B", "2.500000", "2.000000"))

    def test_what_is_not_here_is_taken_from_the_stored_one_and_marked(self):
        absent = {"contender": "A", "problem": "run make horovod", "absent": True}
        failed = {"contender": "B", "problem": "ended with 1", "absent": False}
        stored = {"contenders": [row("A"), row("B"), row("C")]}
        live = {"steps": 3, "contenders": [row("C", difference=1e-9), absent, failed]}
        shown = elsewhere.side_by_side(live, stored)
        assert [one.get("recorded", False) for one in shown["contenders"]] == [False, True, False]
        assert shown["contenders"][2] == failed
        assert shown["contenders"][0]["difference"] == 1e-9
        text = str(elsewhere.elsewhere_table(shown))
        assert "A (recorded)" in text
        assert "B: ended with 1." in text
        assert "make horovod" not in text
        elsewhere.elsewhere_figure(live)
        figure = elsewhere.elsewhere_figure(shown)
        assert "A (recorded): 117,500 bytes, 10 ms" in figure.alt
        assert figure.caption.startswith("All 2 lines lie on each other: no loss differs from one")

    def test_what_was_not_to_run_is_taken_from_it_too(self):
        stored = {
            "contenders": [row("A"), row("B"), {"contender": "D", "problem": "ended with 1"}]
        }
        shown = elsewhere.side_by_side({"contenders": [row("B", difference=0)]}, stored)
        assert [one["contender"] for one in shown["contenders"]] == ["B", "A"]
        assert [one.get("recorded", False) for one in shown["contenders"]] == [False, True]

    def test_in_the_stored_one_all_contenders_agree(self):
        stored = elsewhere.recorded()
        rows = {one["contender"]: one for one in stored["contenders"]}
        assert list(rows) == list(CONTENDERS)
        for name, one in rows.items():
            assert one["agrees"], name
            assert one["difference"] <= CONTENDERS[name].tolerance
            assert one["problem"] == ""
            expected = formula_bytes(CONTENDERS[name].formula).get("worker", 0)
            counted = [n for role, n in one["counted_bytes"].items() if role != "server"]
            assert all(expected <= num_bytes < 1.02 * expected + 1 for num_bytes in counted)
        assert {"hardware", "versions", "command"} <= set(stored)

    def test_nothing_to_draw_and_nothing_stored_are_said(self, tmp_path):
        with pytest.raises(ValueError, match="no contender has trained"):
            elsewhere.elsewhere_figure({"contenders": []})
        with pytest.raises(ValueError, match=r"no record in .*: make elsewhere makes it"):
            elsewhere.recorded(tmp_path / "elsewhere.json")
