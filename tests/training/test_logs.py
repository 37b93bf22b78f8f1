"""What a run writes into its log folder, whole at any time, and never at the cost of the run."""

import csv
import json
import math
import os
import resource
import signal
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from ranks import travel_by_value
from torch import nn

from labkit import RunConfig, WorkerError, train_with
from labkit.__main__ import main
from labkit.training import logs
from labkit.training.logs import RunLogs, check_log_dir, run_logs

travel_by_value(__name__)


def row(loss=1.0, **more):
    numbers = {"loss": loss, "test_accuracy": 0.5, "seconds": 0.1, "train_accuracy": math.nan}
    return numbers | {"test_loss": None, "phases_s": {"wait": 0.25}} | more


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def alone(folder, rank=0):
    comm = SimpleNamespace(rank=rank, world_size=2, device="cpu")
    return RunLogs(comm, RunConfig("single", log_dir=str(folder)))


@contextmanager
def at_most(num_bytes):
    """Limit the size of files that this process writes, as if the disk were full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


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
    for found, expected in zip(table, result.epochs, strict=True):
        for name in ("loss", "test_accuracy", "seconds", "train_accuracy", "test_loss"):
            assert float(found[name]) == expected[name]
        assert found["test_top5"] == "", "there are three classes"
        assert float(found["share_reduce_s"]) == expected["phases_s"]["share_reduce"]
    assert {path.name for path in folder.glob("*.*")} >= {"epochs.csv", "rank0.log", "rank1.log"}
    assert not list(folder.glob(".*"))
    for rank in (0, 1):
        lines = (folder / f"rank{rank}.log").read_text().splitlines()
        said = [line.split(" ", 2)[2] for line in lines]
        assert said[0].startswith(f"rank {rank} of 2 on ")
        settings = json.loads(said[1].removeprefix("settings: "))
        assert settings["strategy"] == "ring_all_reduce"
        assert said[-1] == "ended"
        assert [line for line in said if line.startswith("epoch 2/2: loss")]
        assert said.index("| step 2") < said.index("| 2 %"), "a bar is its last state alone"
        assert "| step 4" in said


def test_a_rank_that_fails_leaves_its_traceback_and_the_epochs_before(tmp_path):
    with pytest.raises(WorkerError, match="broken weights"):
        train_with("ddp", world_size=2, log_dir=str(tmp_path), **own(fails=True))
    assert [int(found["epoch"]) for found in read(tmp_path / "epochs.csv")] == [1]
    failed = (tmp_path / "rank1.log").read_text()
    assert failed.rstrip().endswith("RuntimeError: broken weights")


def test_a_command_with_logs_prints_each_epoch_once_and_logs_it_once(tmp_path, capsys):
    words = ["--strategy", "single", "--model", "mlp", "--train-size", "64", "--epochs", "2"]
    assert main(["train", *words, "--log-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("epoch 2/2: loss") == 1
    assert (tmp_path / "rank0.log").read_text().count("epoch 2/2: loss") == 1
    with pytest.raises(SystemExit):
        main(["train", *words, "--log-dir", str(tmp_path)])
    assert "has the logs of another run (epochs.csv)" in capsys.readouterr().err


def test_a_run_that_goes_on_continues_its_logs(tmp_path):
    folders = {"log_dir": str(tmp_path / "logs"), "checkpoint_dir": str(tmp_path / "saved")}
    settings = {"model": "mlp", "train_size": 64, "batch_size": 32, **folders}
    train_with("ring_all_reduce", world_size=2, epochs=2, **settings)
    after = train_with("ring_all_reduce", world_size=2, epochs=3, resume=True, **settings)
    table = read(tmp_path / "logs" / "epochs.csv")
    assert [int(found["epoch"]) for found in table] == [1, 2, 3]
    assert [float(found["loss"]) for found in table] == [row["loss"] for row in after.epochs]
    for rank in (0, 1):
        text = (tmp_path / "logs" / f"rank{rank}.log").read_text()
        assert text.count(f" rank {rank} of 2 on ") == 2
        epochs = [line.split()[3].rstrip(":") for line in text.splitlines() if " epoch " in line]
        assert epochs == ["1/2", "2/2", "3/3"]


def test_a_folder_with_the_logs_of_another_run_is_refused_unless_that_run_goes_on(tmp_path):
    folder = tmp_path / "a" / "b"
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
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot make log_dir"):
        check_log_dir(str(tmp_path / "file"), resumed=False)


def test_links_and_pipes_of_others_are_not_written_through(tmp_path, capsys):
    (tmp_path / "precious").write_text("mine")
    folder = tmp_path / "logs"
    folder.mkdir()
    for name in ("rank0.log", "epochs.csv"):
        (folder / name).symlink_to(tmp_path / "precious")
    os.mkfifo(folder / "rank1.log")
    for rank in (0, 1):
        writes = alone(folder, rank)
        writes.add([row()])
        writes.close()
    assert (tmp_path / "precious").read_text() == "mine"
    assert len(read(folder / "epochs.csv")) == 1
    assert capsys.readouterr().err.count("the training goes on") == 2


def test_a_full_disk_is_said_once_and_costs_the_log_alone(tmp_path, capsys):
    writes = alone(tmp_path, rank=1)
    table = alone(tmp_path)
    table.add([row()])
    whole = (tmp_path / "epochs.csv").read_text()
    with at_most(100):
        for _ in range(3):
            writes.line("x" * 150)
            table.add([row()] * 20)
    assert (tmp_path / "epochs.csv").read_text() == whole
    said = [line for line in capsys.readouterr().err.splitlines() if "goes on" in line]
    assert 3 <= len(said) <= 4, "the log of rank 0 fails, too"
    writes.line("after")
    assert (tmp_path / "rank1.log").read_text().endswith(" after\n")


def test_what_is_printed_is_bounded_and_the_streams_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(logs, "_MOST_PRINTED", 25)
    before = sys.stdout, sys.stderr
    comm = SimpleNamespace(rank=0, world_size=1, device="cpu")

    def fail():
        with run_logs(comm, RunConfig("single", log_dir=str(tmp_path))):
            assert sys.stdout.encoding == before[0].encoding
            for _ in range(100):
                print("abcdefghij")
            raise KeyError("lost")

    with pytest.raises(KeyError):
        fail()
    assert (sys.stdout, sys.stderr) == before
    text = (tmp_path / "rank0.log").read_text()
    assert text.count("| abcdefghij") == 3
    assert "no more of what is printed, after 25 characters" in text
    assert "KeyError: 'lost'" in text
    with run_logs(comm, RunConfig("single")) as nothing:
        nothing.add([row()])


def test_without_tensorboard_one_line_says_how_to_get_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    writes = alone(tmp_path)
    for count in (1, 2, 3):
        writes.add([row()] * count)
    (said,) = capsys.readouterr().err.splitlines()
    assert "pip install tensorboard" in said
    assert said.endswith("the training goes on")


def test_tensorboard_reads_the_numbers_and_those_before_a_resumption_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first, again = alone(tmp_path), alone(tmp_path)
    for count in (1, 2, 3):
        first.add([row(loss) for loss in range(count)])
    again.add([row(0), row(20)])
    again.add([row(0), row(20), row(30)])
    for one in (first, again):
        one.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    losses = {event.step: event.value for event in found.Scalars("loss/train")}
    assert losses == {1: 0, 2: 20, 3: 30}
    tags = {"loss/train", "accuracy/held_out", "seconds/epoch", "seconds/wait"}
    assert set(found.Tags()["scalars"]) == tags
