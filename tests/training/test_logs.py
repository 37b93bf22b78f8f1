"""What a run writes into its log folder, whole at any time, and never at the cost of the run."""

import csv
import io
import json
import math
import os
import resource
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from ranks import travel_by_value
from torch import nn

from labkit import RunConfig, WorkerError, train_with
from labkit.__main__ import main
from labkit.training import logs
from labkit.training.logs import Copied, Events, RankLog, Table, check_log_dir, run_logs

travel_by_value(__name__)

QUICK = {"model": "mlp", "train_size": 64, "batch_size": 32}


def row(loss=1.0, **more):
    numbers = {"loss": loss, "test_accuracy": 0.5, "seconds": 0.1, "train_accuracy": math.nan}
    return numbers | {"test_loss": None, "phases_s": {"wait": 0.25}} | more


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def alone(rank=0):
    return SimpleNamespace(rank=rank, world_size=2, device="cpu")


@contextmanager
def at_most(num_bytes):
    """Limit the size of files that this process writes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Talking(nn.Linear):
    """It prints, draws a bar, and fails on request in the second epoch on the second rank."""

    def __init__(self, fails=False):
        super().__init__(6, 3)
        self.calls, self.fails = 0, fails

    def forward(self, inputs):
        self.calls += self.training
        if self.training:
            print(f"step {self.calls}")
            print(f"\r{self.calls} %", end="\n" if self.calls == 2 else "", file=sys.stderr)
        if self.fails and self.calls == 3 and os.environ["RANK"] == "1":
            raise RuntimeError("broken weights")
        return super().forward(inputs)


def own(fails=False):
    from own_parts import Points

    data = Points(20), Points(9, seed=1)
    return {"model": lambda: Talking(fails), "dataset": data, "batch_size": 10, "epochs": 2}


def test_a_run_leaves_a_table_and_a_log_of_each_rank(tmp_path):
    folder = tmp_path / "runs" / "first"
    result = train_with("ring_all_reduce", world_size=2, log_dir=str(folder), **own())
    table = read(folder / "epochs.csv")
    assert [int(found["epoch"]) for found in table] == [1, 2]
    for found, due in zip(table, result.epochs, strict=True):
        for name in ("loss", "test_accuracy", "seconds", "train_accuracy", "test_loss"):
            assert float(found[name]) == due[name]
        assert found["test_top5"] == "", "there are three classes"
        assert float(found["share_reduce_s"]) == due["phases_s"]["share_reduce"]
    assert {path.name for path in folder.glob("*.*")} >= {"epochs.csv", "rank0.log", "rank1.log"}
    assert not list(folder.glob(".*"))
    for rank in (0, 1):
        lines = (folder / f"rank{rank}.log").read_text().splitlines()
        said = [line.split(" ", 2)[2] for line in lines]
        assert said[0].startswith(f"rank {rank} of 2 on ")
        assert f"process {os.getpid()}" not in said[0]
        settings = json.loads(said[1].removeprefix("settings: "))
        assert settings["strategy"] == "ring_all_reduce"
        assert said[-1] == "ended"
        assert [line for line in said if line.startswith("epoch 2/2: loss")]
        assert said.index("| step 2") < said.index("| 2 %"), "a bar is its last state alone"
        assert "| step 4" in said
        assert not any("1 %" in line for line in said)


def test_a_rank_that_fails_leaves_its_traceback_and_the_epochs_before(tmp_path):
    with pytest.raises(WorkerError, match="broken weights"):
        train_with("ddp", world_size=2, log_dir=str(tmp_path), **own(fails=True))
    assert [int(found["epoch"]) for found in read(tmp_path / "epochs.csv")] == [1]
    failed = (tmp_path / "rank1.log").read_text()
    assert 'raise RuntimeError("broken weights")' in failed
    assert failed.rstrip().endswith("RuntimeError: broken weights")
    assert "epoch 1/2" in failed


def test_a_command_with_logs_prints_each_epoch_once_and_logs_it_once(tmp_path, capsys):
    words = ["--strategy", "single", "--model", "mlp", "--train-size", "64", "--epochs", "2"]
    assert main(["train", *words, "--log-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("epoch 2/2: loss") == 1
    assert (tmp_path / "rank0.log").read_text().count("epoch 2/2: loss") == 1
    with pytest.raises(SystemExit):
        main(["train", *words, "--log-dir", str(tmp_path)])
    assert "has the logs of another run (epochs.csv)" in capsys.readouterr().err


def test_a_run_that_goes_on_continues_its_logs(tmp_path):
    folders = {"log_dir": str(tmp_path / "logs"), "checkpoint_dir": str(tmp_path / "kept")}
    settings = {"model": "mlp", "train_size": 64, "batch_size": 32, **folders}
    before = train_with("ring_all_reduce", world_size=2, epochs=2, **settings)
    after = train_with("ring_all_reduce", world_size=2, epochs=3, resume=True, **settings)
    assert [row["loss"] for row in after.epochs[:2]] == [row["loss"] for row in before.epochs]
    table = read(tmp_path / "logs" / "epochs.csv")
    assert [int(found["epoch"]) for found in table] == [1, 2, 3]
    assert [float(found["loss"]) for found in table] == [row["loss"] for row in after.epochs]
    assert all(found["compute_s"] for found in table)
    for rank in (0, 1):
        text = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        assert text.count(f" rank {rank} of 2 on ") == 2
        epochs = [line.split()[3].rstrip(":") for line in text.splitlines() if " epoch " in line]
        assert epochs == ["1/2", "2/2", "3/3"]


# Whose folder it is


def test_a_folder_with_the_logs_of_another_run_is_refused_unless_that_run_goes_on(tmp_path):
    folder = tmp_path / "a" / "b"
    check_log_dir(str(folder), resumed=False)
    assert folder.is_dir()
    (folder / "notes.txt").touch()
    check_log_dir(str(folder), resumed=False)
    for name in ("epochs.csv", "rank3.log", "events.out.tfevents.1.host.2.0"):
        (folder / name).touch()
        with pytest.raises(ValueError, match=f"logs of another run .{name}.: give another"):
            check_log_dir(str(folder), resumed=False)
        check_log_dir(str(folder), resumed=True)
        (folder / name).unlink()
    # Under torchrun the other ranks may have begun.
    (folder / "rank0.log").touch()
    check_log_dir(str(folder), resumed=False, rank=1)
    with pytest.raises(ValueError, match=r"another run \(rank0.log\)"):
        check_log_dir(str(folder), resumed=False, rank=0)


def test_what_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="cannot make log_dir"):
            check_log_dir(str(path), resumed=False)
    with pytest.raises(ValueError, match="cannot make log_dir ''"):
        check_log_dir("", resumed=False)


# The table


def test_after_a_resumption_no_epoch_is_there_twice(tmp_path):
    table = Table(str(tmp_path / "epochs.csv"))
    for count in (1, 2, 3):
        table.write([row(number) for number in range(count)])
    # Killed in the fourth epoch, and continued from the end of the first.
    again = Table(str(tmp_path / "epochs.csv"))
    again.write([row(0), row(11, phases_s={"compute": 1.5})])
    found = read(tmp_path / "epochs.csv")
    assert [(int(one["epoch"]), float(one["loss"])) for one in found] == [(1, 0), (2, 11)]
    assert [one["wait_s"] for one in found] == ["0.25", ""]
    assert [one["compute_s"] for one in found] == ["", "1.5"]
    assert [one["train_accuracy"] for one in found] == ["", ""], "not measured"
    assert [one["test_loss"] for one in found] == ["", ""]


def test_a_full_disk_is_said_once_and_costs_the_log_alone(tmp_path, capsys):
    table, log = Table(str(tmp_path / "epochs.csv")), RankLog(str(tmp_path / "rank0.log"))
    table.write([row()])
    log.line("before")
    whole = (tmp_path / "epochs.csv").read_text()
    with at_most(200):
        for count in range(10, 13):
            table.write([row()] * count)
            log.line("x" * 150)
    assert (tmp_path / "epochs.csv").read_text() == whole
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2
    assert all(line.endswith("the training goes on") for line in said)
    table.write([row()] * 3)
    log.line("after")
    log.close()
    assert len(read(tmp_path / "epochs.csv")) == 3
    lines = (tmp_path / "rank0.log").read_text().splitlines()
    assert lines[0].endswith("before")
    assert lines[-1].endswith(" after")
    assert len(lines[-1]) < 40, "what was cut off is a line of its own"


def test_a_log_that_cannot_be_opened_is_said_and_costs_nothing_else(tmp_path, capsys):
    log = RankLog(str(tmp_path / "nowhere" / "rank0.log"))
    log.line("text")
    log.printed("more")
    log.close()
    assert capsys.readouterr().err.count("No such file or directory; the training goes on") == 1


# What a rank prints


def printed(tmp_path, *texts):
    log = RankLog(str(tmp_path / "rank0.log"))
    stream = Copied(io.StringIO(), log)
    for text in texts:
        stream.write(text)
    stream.end()
    log.close()
    lines = (tmp_path / "rank0.log").read_text().splitlines()
    return [line[len("2026-01-01 00:00:00 ") :] for line in lines]


def test_lines_are_added_when_they_are_complete(tmp_path):
    assert printed(tmp_path, "one\ntw", "o\n", "\n", "an end") == ["| one", "| two", "| an end"]


def test_what_is_printed_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_MOST_PRINTED", 25)
    monkeypatch.setattr(logs, "_LONGEST_LINE", 10)
    found = printed(tmp_path, *("abcdefghijklmno\n" for _ in range(100)), "p" * 99)
    assert found == ["| abcdefghij"] * 2 + ["no more of what is printed, after 25 characters"]


def test_a_copied_stream_is_the_stream_it_copies(tmp_path, capsys):
    log = RankLog(str(tmp_path / "rank0.log"))
    stream = Copied(sys.stdout, log)
    assert stream.write("four") == 4
    stream.writelines([" and", " more\n"])
    print("surrogate \udc80".encode(errors="replace").decode(), file=stream, flush=True)
    assert stream.encoding == sys.stdout.encoding
    assert stream.isatty() is False
    assert capsys.readouterr().out.startswith("four and more\n")
    log.close()
    assert "| four and more\n" in (tmp_path / "rank0.log").read_text()


def test_the_streams_come_back_after_an_error(tmp_path):
    before = sys.stdout, sys.stderr
    config = RunConfig("single", log_dir=str(tmp_path))

    def fail():
        with run_logs(alone(), config):
            assert sys.stdout is not before[0]
            raise KeyError("lost")

    with pytest.raises(KeyError):
        fail()
    assert (sys.stdout, sys.stderr) == before
    assert "KeyError: 'lost'" in (tmp_path / "rank0.log").read_text()
    with run_logs(alone(), RunConfig("single")) as nothing:
        assert sys.stdout is before[0]
        nothing.add([row()])
    assert len(list(tmp_path.iterdir())) == 1


# TensorBoard


def test_without_tensorboard_one_line_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    events = Events(str(tmp_path))
    for count in (1, 2, 3):
        events.write([row()] * count)
    (said,) = capsys.readouterr().err.splitlines()
    assert "pip install tensorboard" in said
    assert said.endswith("the training goes on")
    assert not list(tmp_path.iterdir())


def test_tensorboard_reads_the_numbers_and_those_before_a_resumption_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first, again = Events(str(tmp_path)), Events(str(tmp_path))
    for count in (1, 2, 3):
        first.write([row(loss) for loss in range(count)])
    again.write([row(0), row(20)])
    again.write([row(0), row(20), row(30)])
    for events in (first, again):
        events.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    losses = {event.step: event.value for event in found.Scalars("loss/train")}
    assert losses == {1: 0, 2: 20, 3: 30}
    assert len(found.Scalars("loss/train")) == 3
    tags = {"loss/train", "accuracy/held_out", "seconds/epoch", "seconds/wait"}
    assert set(found.Tags()["scalars"]) == tags


def test_a_full_disk_ends_tensorboards_files_alone(tmp_path, capsys, monkeypatch):
    pytest.importorskip("tensorboard")
    # TensorBoard's own thread tells of its end, too.
    monkeypatch.setattr(threading, "excepthook", lambda told: None)
    events = Events(str(tmp_path))
    with at_most(400):
        for count in range(1, 40):
            events.write([row()] * count)
    said = [line for line in capsys.readouterr().err.splitlines() if "goes on" in line]
    assert len(said) == 1
    assert said[0].startswith("no TensorBoard files: ")
