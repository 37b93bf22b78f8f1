"""Every number that a comparison has recorded, as CSV files and by epoch."""

import csv
import io
import json

import pytest
from ranks import travel_by_value
from test_compare import made_by_hand

from labkit.__main__ import main
from labkit.tracing import Span, Trace
from workbook import plots
from workbook.measure import compare
from workbook.measure.compare.by_epoch import breakdown, epoch_breakdowns, loading
from workbook.measure.compare.figures import draw
from workbook.measure.compare.phases import epochs_by_role
from workbook.measure.compare.tables import as_csv, tables

travel_by_value(__name__)


def whole_record():
    """Three repeats of 3 epochs; the ring computes half of each, and a server waits."""
    record = made_by_hand()
    for run in record["runs"]:
        for number, epoch in enumerate(run["epochs"]):
            epoch |= {"train_accuracy": 0.4 + number / 10, "test_loss": 0.7, "test_top5": None}
        seconds = [epoch["seconds"] for epoch in run["epochs"]]
        phases = {"worker": [{"compute": s / 2, "data": 0.1} for s in seconds]}
        if run["contender"] == "ring":
            phases["server"] = [{"wait": 2 * s} for s in seconds]
        run["epoch_phases_s"] = phases
    sizes = {50: [0.1, 0.2, 0.3], 100: [0.4, 0.5, 0.6]}
    record["loading"] = [{"train_size": n, "seconds": s} for n, s in sizes.items()]
    return record


def test_every_run_and_epoch_has_its_rows():
    record = whole_record()
    found = tables(record)
    runs = len(record["runs"])
    assert {name: len(rows) for name, rows in found.items()} == {
        "epochs": 3 * runs,
        "phases": 3 * (2 * runs + 4 * 3),
        "times": runs,
        "time_to_accuracy": 3 * 3,
        "loading": 6,
    }
    ring = [row for row in found["epochs"] if row["contender"] == "ring" and row["repeat"] == 2]
    first, second, third = ring[:3]
    assert (first["by"], first["world_size"], first["train_size"]) == ("labkit", 2, 100)
    assert [row["epoch"] for row in (first, second, third)] == [1, 2, 3]
    assert third["passed_s"] == pytest.approx(3 + 2 + 2)
    assert (second["train_accuracy"], second["test_top5"]) == (0.5, None)
    assert {row["by"] for row in found["epochs"] if row["contender"] == "Torch"} == {"PyTorch"}
    # Its own turn: one device took three times as long in each repeat.
    (alike,) = {row["single_s / epoch_s"] for row in found["times"] if _is_main_ring(row)}
    assert alike == 3.0
    reached = [row for row in found["time_to_accuracy"] if row["contender"] == "ring"]
    assert [(row["epochs"], row["seconds"]) for row in reached] == [(3, 4.0), (3, 7.0), (3, 4.3)]
    assert found["loading"][-1] == {"train_size": 100, "repeat": 3, "seconds": 0.6}


def _is_main_ring(row):
    place = row["world_size"], row["train_size"], row["batch_size"]
    return row["contender"] == "ring" and place == (2, 100, 32)


def test_an_older_record_has_fewer_tables_and_empty_cells():
    found = tables(made_by_hand())
    assert set(found) == {"epochs", "times", "time_to_accuracy"}
    rows = list(csv.DictReader(io.StringIO(as_csv(found["epochs"]))))
    assert {row["train_accuracy"] for row in rows} == {""}
    assert not {"epochs", "loading"} & draw(made_by_hand()).keys()
    with pytest.raises(ValueError, match="record it anew"):
        breakdown(made_by_hand())


def test_a_record_is_read_and_written_as_tables(tmp_path, capsys):
    path = tmp_path / "in.json"
    path.write_text(json.dumps(whole_record()))
    assert main(["compare", "--from", str(path), "--csv", str(tmp_path)]) == 0
    assert "compare_phases.csv" in capsys.readouterr().out
    names = {"epochs", "phases", "times", "time_to_accuracy", "loading"}
    found = {file.name: file.read_text() for file in tmp_path.glob("*.csv")}
    assert set(found) == {f"compare_{name}.csv" for name in names}
    assert found["compare_epochs.csv"] == as_csv(tables(compare.load(path))["epochs"])
    with pytest.raises(SystemExit):
        main(["compare", "--from", str(path), "--csv", str(tmp_path / "nowhere")])
    assert "give a folder that exists" in capsys.readouterr().err


# By epoch


def spans(*rows, rank=0):
    return [Span(rank, kind, start, end) for kind, start, end in rows]


def test_phases_of_every_epoch_are_means_over_the_ranks_of_a_role():
    one = spans(("data", 0, 1), ("compute", 1, 3), ("evaluate", 3, 4), ("data", 4, 6))
    one += spans(("compute", 6, 7), ("evaluate", 7, 8))
    two = spans(("data", 0, 1), ("compute", 1, 2), ("wait", 2, 3), ("evaluate", 3, 4), rank=1)
    two += spans(("data", 4, 5), ("compute", 5, 7), ("evaluate", 7, 8), rank=1)
    assert epochs_by_role(Trace.merge([one, two]), [3.0, 3.0]) == {
        "worker": [
            {"compute": 1.5, "data": 1.0, "wait": 0.5},
            {"compute": 1.5, "data": 1.5},
        ]
    }


def test_where_ranks_do_not_wait_the_server_s_epochs_cut_all_spans():
    server = spans(("wait", 0, 3), ("update", 3, 5), ("evaluate", 5, 6))
    worker = spans(("data", 0, 1), ("compute", 1, 5), rank=1)
    assert epochs_by_role(Trace.merge([server, worker]), [2.0, 3.0]) == {
        "worker": [{"compute": 1.0, "data": 1.0}, {"compute": 3.0}],
        "server": [{"wait": 2.0}, {"update": 2.0, "wait": 1.0}],
    }


def test_a_bar_is_as_long_as_its_epoch():
    bars = epoch_breakdowns(whole_record())
    assert list(bars) == ["single", "ring: worker", "ring: server", "Torch"]
    # Medians of the repeats: 1.1 times 1 s, and 1 s more in the first epoch.
    first, second, _ = bars["ring: worker"]
    assert first == pytest.approx({"compute": 1.05, "data": 0.1, "other": 0.95})
    assert second == pytest.approx({"compute": 0.55, "data": 0.1, "other": 0.45})
    assert bars["ring: server"][1] == pytest.approx({"wait": 1.1}), "scaled to fit"
    assert list(epoch_breakdowns(whole_record(), ["Torch"])) == ["Torch"]


def test_the_figures_say_what_the_numbers_say():
    record = whole_record()
    assert {"epochs", "loading"} <= draw(record).keys()
    figure = breakdown(record)
    assert "ring: server wait 100%" in figure.alt
    assert figure.caption.startswith("First epoch / median of the others: ")
    assert len([axes for axes in figure.figure.axes if axes.get_visible()]) == 4
    said = loading(record).caption
    assert "load the data set, once per rank: 200 ms for 50 samples, 500 ms for 100" in said
    assert "read an epoch's batches: 100 ms for 50 samples, 100 ms for 100 samples" in said


def test_curves_have_a_row_for_the_training_accuracy_if_all_runs_have_it():
    epochs = whole_record()["runs"][0]["epochs"]
    assert len(plots.learning_curves({"a": epochs}).figure.axes) == 4
    axes = plots.learning_curves({"a": [epochs, epochs]}, training=True).figure.axes
    assert len(axes) == 6
    assert axes[2].get_ylabel() == "training accuracy (%)"
    assert list(axes[2].lines[0].get_ydata()) == pytest.approx([40, 50, 60])
    older = made_by_hand()["runs"][0]["epochs"]
    both = plots.learning_curves({"a": epochs, "b": older}, training=True)
    assert len(both.figure.axes) == 4
