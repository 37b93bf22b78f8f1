"""What a run writes into its log folder, whole at any time, and never at the cost of the run."""

import csv
import math

import pytest
from test_files import at_most

from labkit import train_with
from labkit.training.loop import Logs


def row(loss=1.0):
    return {"loss": loss, "test_accuracy": 0.5, "seconds": 0.1, "train_accuracy": math.nan}


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_that_goes_on_continues_its_table(tmp_path):
    folders = {
        "log_dir": str(tmp_path / "runs" / "logs"),
        "checkpoint_dir": str(tmp_path / "saved"),
    }
    settings = {"model": "mlp", "train_size": 64, "batch_size": 32, **folders}
    train_with("ring_all_reduce", world_size=2, epochs=2, **settings)
    after = train_with("ring_all_reduce", world_size=2, epochs=3, resume=True, **settings)
    table = read(tmp_path / "runs" / "logs" / "epochs.csv")
    assert [int(found["epoch"]) for found in table] == [1, 2, 3]
    for found, expected in zip(table, after.epochs, strict=True):
        for name in ("loss", "test_accuracy", "seconds", "train_accuracy", "test_loss"):
            assert float(found[name]) == expected[name]
    assert not list((tmp_path / "runs" / "logs").glob(".*"))
    with pytest.raises(ValueError, match="has the logs of another run"):
        train_with("single", log_dir=folders["log_dir"])


def test_a_link_of_another_user_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "epochs.csv").symlink_to(tmp_path / "precious")
    Logs(str(tmp_path)).add([row()])
    assert (tmp_path / "precious").read_text() == "mine"
    assert len(read(tmp_path / "epochs.csv")) == 1


def test_a_full_disk_is_said_once_and_costs_the_log_alone(tmp_path, capsys):
    logs = Logs(str(tmp_path))
    logs.add([row()])
    whole = (tmp_path / "epochs.csv").read_text()
    with at_most(100):
        for _ in range(3):
            logs.add([row()] * 20)
    logs.close()
    assert (tmp_path / "epochs.csv").read_text() == whole
    assert capsys.readouterr().err.count("no more logs in") == 1


def test_tensorboard_reads_the_numbers_and_those_before_a_resumption_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = Logs(str(tmp_path))
    for count in (1, 2, 3):
        first.add([row(loss) for loss in range(count)])
    again = Logs(str(tmp_path), 1)
    again.add([row(0), row(20)])
    again.add([row(0), row(20), row(30)])
    for one in (first, again):
        one.close()
    found = EventAccumulator(str(tmp_path)).Reload()
    losses = {event.step: event.value for event in found.Scalars("loss")}
    assert losses == {1: 0, 2: 20, 3: 30}
    assert set(found.Tags()["scalars"]) == {"loss", "test_accuracy", "seconds"}
