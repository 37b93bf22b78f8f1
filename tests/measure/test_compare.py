"""labkit compare: what is run, what a record says, and the figures' claims."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit import strategies, train_with
from labkit.__main__ import main
from labkit.comm.peak_memory import PeakMemory
from labkit.config import STAGED
from labkit.errors import WorkerError
from labkit.tracing import Span, Trace
from workbook.measure import compare
from workbook.measure.compare import command, figures, measure, summary
from workbook.measure.compare.measure import Comparison, Setting, find_contenders, settings_of
from workbook.measure.compare.phases import epoch_windows, epochs_by_role

pytestmark = pytest.mark.slow

MAIN = Setting(2, 100, 32, 3)


def contender(name, **more):
    one = {"name": name, "strategy": name, "builtin": False, "backend": "auto"}
    return one | {"counterpart": None, "own_pace": False} | more


def run_row(name, setting, repeat, seconds, accuracy=(0.5, 0.9, 0.96)):
    """A run whose first epoch takes 1 s more than the others; half of each is computing."""
    took = [seconds + (epoch == 0) for epoch in range(len(accuracy))]
    epochs = [{"loss": 1.0, "test_accuracy": a, "seconds": s} for a, s in zip(accuracy, took)]
    phases = {"worker": [{"compute": s / 2, "data": 0.1} for s in took]}
    if name == "ring":
        phases["server"] = [{"wait": 2 * s} for s in took]
    return {
        "contender": name,
        "setting": setting,
        "repeat": repeat,
        "epochs": epochs,
        "epoch_phases_s": phases,
        "bytes_sent": [2048, 4096] if name == "ring" else None,
        "messages": None,
        "peak_memory": [{"process_bytes": 2**20, "devices": {}}, None],
        "replicas_agree": True,
        "note": None,
        "difference_from_single": 1e-7,
    }


def made_by_hand():
    """ring takes 1 s an epoch, PyTorch 2 s and single 3 s; slower on 4 ranks, faster on half."""
    settings = [(2, 100, 32), (4, 100, 32), (2, 50, 32), (2, 100, 64)]
    names = ("world_size", "train_size", "batch_size")
    runs = []
    for repeat, drift in enumerate((1.0, 2.0, 1.1)):
        for index, factor in enumerate((1.0, 3.0, 0.5, 0.8)):
            for name, seconds in (("ring", 1.0), ("Torch", 2.0), ("single", 3.0)):
                if name != "single" or index != 1:
                    runs.append(run_row(name, index, repeat, seconds * factor * drift))
    theirs = contender("Torch", strategy="ring", builtin=True)
    return {
        "command": "labkit compare",
        "config": {"model": "mlp", "dataset": "digits", "target": 0.95, "gpus_used": 0},
        "contenders": [contender("single"), contender("ring", counterpart="Torch"), theirs],
        "settings": [dict(zip(names, one)) | {"epochs": 3} for one in settings],
        "runs": runs,
        "skipped": [],
        "loading": [{"train_size": n, "seconds": [0.1 * n, 0.2 * n]} for n in (50, 100)],
        "hardware": {"cores": 2, "cpu": "a CPU", "gpus": []},
        "versions": {},
    }


# Who takes part


@pytest.mark.parametrize("names", [(), strategies.STRATEGIES], ids=["by default", "all"])
def test_every_class_takes_part_once_and_single_is_first(names):
    found = find_contenders(names)
    expected = set(names or strategies.STRATEGIES) - set(() if names else STAGED)
    assert found[0].name == "single"
    assert {one.name for one in found if not one.builtin} == expected
    assert len({one.name for one in found}) == len(found)
    builtins = [one for one in found if one.builtin]
    for one in found:
        assert one.counterpart is None or one.counterpart in {other.name for other in builtins}


def test_settings_differ_from_the_main_one_in_one_thing():
    found = settings_of((1, 2, 4), (25, 100), (16, 32, 64), 6, units=2)
    assert found[0] == Setting(2, 100, 32, 6)
    assert found[1:3] == [Setting(1, 100, 32, 3), Setting(4, 100, 32, 3)]
    assert found[3:] == [Setting(2, 25, 32, 3), Setting(2, 100, 16, 3), Setting(2, 100, 64, 3)]
    # What was said twice would run twice as the same repeat.
    twice = settings_of((1, 1, 2, 2), (9, 5, 5), (8, 8), 1, units=2)
    assert twice == [Setting(2, 9, 8, 1), Setting(1, 9, 8, 1), Setting(2, 5, 8, 1)]


@pytest.fixture
def runs(monkeypatch):
    """No processes: (strategy, world size, seed) of each run, in order. Some refuse, some fail."""
    done = []

    def train_run(config, timeout_s):
        done.append((config.strategy, config.world_size, config.seed))
        if config.strategy == "ring_all_reduce" and config.world_size == 1:
            raise ValueError("needs a neighbour\nand more")
        if config.builtin:
            raise WorkerError("rank 1 raised\nmore", worker_traceback="ValueError: lost")
        return SimpleNamespace(
            config=config,
            epochs=[{"loss": 1.0, "test_accuracy": 0.5, "seconds": 0.1}],
            trace=Trace((Span(0, "data", 0, 1), Span(0, "compute", 1, 2))),
            bytes_sent=[1],
            messages=[1],
            replicas_agree=True,
            notes={},
            peak_memory=[PeakMemory(5), None],
            difference_from=lambda other: 0.0,
        )

    monkeypatch.setattr(measure, "train_run", train_run)
    return done


def comparison(settings):
    taking_part = find_contenders(("ring_all_reduce",), device="cpu")
    common = {"model": "mlp", "dataset": "digits", "device": "cpu", "seed": 7}
    return Comparison(taking_part, settings, common, say=lambda line: None)


def test_each_repeat_begins_with_another_and_what_was_refused_is_not_tried_again(runs):
    compared = comparison([MAIN, Setting(1, 100, 32, 3)])
    compared.run(repeats=2, budget_s=0)
    ring, single = "ring_all_reduce", "single"
    first = [(single, 1, 7), (ring, 2, 7), (ring, 2, 7), (ring, 2, 7)]
    # On one rank: ours refused, PyTorch's broke off on both backends; single has run already.
    first += [(ring, 1, 7)] * 3
    assert runs == [*first, (ring, 2, 8), (single, 1, 8)]
    reasons = {(row["contender"], row["world_size"]): row for row in compared.skipped}
    assert reasons[ring, 1]["reason"] == "needs a neighbour"
    assert not reasons[ring, 1]["failed"]
    assert reasons["TorchDDP (labkit)", 2]["failed"]
    assert {row["contender"] for row in compared.runs} == {single, ring}


def test_repeats_stop_when_the_budget_is_used_up_and_settings_left_out_are_recorded(
    runs, monkeypatch
):
    clock = iter(range(1000))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    compared = comparison([MAIN, Setting(2, 50, 32, 3)])
    # The clock ticks at each look: the first setting ends at 2 s.
    compared.run(repeats=None, budget_s=3)
    assert {row["setting"] for row in compared.runs} == {0}
    (row,) = [row for row in compared.skipped if row["contender"] == "all contenders"]
    assert row["train_size"] == 50
    assert "budget" in row["reason"]


# Phases


def test_the_phases_of_an_epoch_leave_out_evaluation():
    worker = [
        Span(0, kind, start, end)
        for kind, start, end in (
            *(("data", 0, 1), ("compute", 1, 5), ("evaluate", 5, 6), ("share_reduce", 6, 7)),
            *(("evaluate", 7, 8), ("data", 9, 10), ("compute", 10, 12), ("share_reduce", 12, 13)),
            ("evaluate", 14, 15),
        )
    ]
    assert epoch_windows(worker) == [(0, 5), (9, 14)]
    found = epochs_by_role(Trace(tuple(worker)), [5.0, 5.0])
    assert found == {
        "worker": [
            {"data": 1.0, "compute": 4.0},
            {"compute": 2.0, "data": 1.0, "share_reduce": 1.0},
        ]
    }


@pytest.mark.parametrize("name", strategies.STRATEGIES)
def test_the_roles_of_every_technique_s_ranks(name):
    settings = {"world_size": 1 if name == "single" else 3, "device": "cpu", "train_size": 64}
    result = train_with(name, model="mlp", **settings)
    expected = {"worker", "server"} if "parameter_server" in name else {"worker"}
    expected = {"stage"} if name in STAGED else expected
    halves = [result.epochs[0]["seconds"] / 2] * 2
    by_epoch = epochs_by_role(result.trace, halves)
    assert by_epoch.keys() == expected
    assert all(len(rows) == 2 for rows in by_epoch.values())


# What a record says


def test_an_epochs_time_leaves_out_the_first_and_time_to_target_counts_it():
    record = made_by_hand()
    assert summary.epoch_times(record, "ring") == [1.0, 2.0, 1.1]
    assert summary.reached(record, "ring")[0] == (3, 4.0)
    record["config"]["target"] = 0.99
    assert summary.reached(record, "ring") is None
    assert "Not reached in every repeat within 3 epochs: single, ring, Torch." in (
        figures.time_to_accuracy(record).caption
    )


def test_ratios_are_of_pairs_so_drift_drops_out():
    record = made_by_hand()
    assert summary.against_pytorch(record, record["contenders"][1]) == [2.0, 2.0, 2.0]
    assert summary.against_pytorch(record, record["contenders"][2]) == []


def test_efficiency_divides_by_the_devices_that_are_used():
    record = made_by_hand()
    assert summary.efficiency(record, "ring")[4] == pytest.approx([1.0] * 3)
    record["config"]["gpus_used"] = 2
    assert summary.efficiency(record, "ring")[4] == pytest.approx([0.5] * 3)


def test_phases_fill_the_epoch_and_no_more():
    found = summary.epoch_phases(made_by_hand())
    assert found.keys() == {"single", "ring: worker", "ring: server", "Torch"}
    assert found["ring: worker"][1] == pytest.approx({"compute": 0.55, "data": 0.1, "other": 0.45})
    # Threads that wait at the same time are scaled to fit.
    assert found["ring: server"][1] == pytest.approx({"wait": 1.1})


def test_the_figures_say_what_the_numbers_say():
    drawn = figures.draw(made_by_hand())
    assert set(drawn) == {
        *("curves", "curves_pytorch", "phases", "epochs", "loading", "memory"),
        *("time_to_accuracy", "ranks", "efficiency", "train_size", "batch_size"),
    }
    captions = {name: figure.caption for name, figure in drawn.items()}
    assert "the fastest epoch is that of ring: 1.1 s (one device: 3.3 s)" in captions["ranks"]
    assert "ring 1.1 s at 2, 3.3 s at 4" in captions["ranks"]
    assert "N ranks are N - 1 workers" in captions["ranks"]
    assert "ring 300% at 2, 100% at 4" in captions["efficiency"]
    # Three epochs, the first 1 s longer: 3 x 1.1 + 1.
    assert (
        "First at 95%: ring, after 4.3 s. Last: single, after 10.9 s."
        in (captions["time_to_accuracy"])
    )
    assert "Communication of Torch, if any" in captions["phases"]
    assert "load the data set, once per rank 7.5 s at 50, 15 s at 100" in captions["loading"]
    for figure in drawn.values():
        assert figure.png()


def test_what_did_not_run_is_not_drawn():
    record = made_by_hand()
    runs = record["runs"]
    record["runs"] = [run for run in runs if run["contender"] != "single"]
    assert "efficiency" not in figures.draw(record)
    record["settings"] = record["settings"][:1]
    record["runs"] = [r for r in runs if r["setting"] == 0 and r["contender"] == "single"]
    assert not {"ranks", "train_size", "curves_pytorch"} & figures.draw(record).keys()
    record["runs"] = []
    assert figures.draw(record) == {}
    assert "mlp on digits" in summary.report(record)


def test_a_run_that_diverged_is_read_and_drawn():
    """JSON has no NaN: it is null there, and such a run does not equal one device."""
    record = made_by_hand()
    record["runs"][1]["epochs"][-1]["loss"] = None
    record["runs"][1]["difference_from_single"] = None
    assert "not finite" in summary.report(record)
    assert figures.draw(record)


# The command


def test_a_run_is_recorded_and_from_says_and_draws_the_same(tmp_path, capsys):
    """On real ranks: three contenders and single, one setting, one epoch of 60 samples."""
    path, folder = tmp_path / "out.json", tmp_path / "shown"
    folder.mkdir()
    words = ["--strategies", "ring_all_reduce", "--model", "mlp", "--train-size", "60"]
    words += ["--batch-size", "16", "--world-size", "2", "--epochs", "1", "--repeats", "1"]
    words += ["--device", "cpu"]
    assert main(["compare", *words, "--json", str(path)]) == 0
    said = capsys.readouterr().out
    record = json.loads(path.read_text())
    assert record["command"] == " ".join(["labkit compare", *words])
    names = ["single", "ring_all_reduce", "TorchDDP", "TorchDDP (labkit)"]
    assert [run["contender"] for run in record["runs"]] == names
    for run in record["runs"]:
        assert run["difference_from_single"] < 1e-5
        assert run["replicas_agree"]
        assert run["epoch_phases_s"]["worker"][0]["compute"] > 0
    assert {"share_reduce", "share_only"} <= record["runs"][1]["epoch_phases_s"]["worker"][
        0
    ].keys()
    both = ["--figures", str(folder), "--csv", str(folder)]
    assert main(["compare", "--from", str(path), *both]) == 0
    again = capsys.readouterr().out
    assert again.startswith(said[said.index("mlp on digits: 60 samples") :])
    drawn = {file.stem for file in folder.glob("*.png")}
    expected = ("curves", "curves_pytorch", "phases", "time_to_accuracy", "epochs", "loading")
    assert drawn - {"compare_memory"} == {f"compare_{name}" for name in expected}
    # One epoch each, and a line of names.
    assert (folder / "compare_epochs.csv").read_text().count("\n") == 1 + len(names)
    assert {file.stem for file in folder.glob("*.csv")} >= {"compare_phases", "compare_loading"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategies", "magic"], "unknown strategy 'magic'"),
        (["--target", "950"], "the target, an accuracy, must be at most 1, got 9.5"),
        (["--batch-size", "2", "--world-size", "4"], "smaller than world_size 4"),
        (["--train-size", "99999"], "digits has 1437 training samples"),
        (["--json", "/nowhere/out.json"], "in a folder that exists"),
        (["--figures", "/nowhere"], "give a folder that exists"),
        (["--from", "/nowhere/in.json"], "No such file"),
        (["--from", "x.json", "--epochs", "3"], "cannot change it: drop --epochs"),
    ],
)
def test_errors_of_use_are_one_line_and_exit_2(words, message, refused):
    assert message in refused("compare", *words)


@pytest.mark.parametrize("content", ["{", "[]", '{"command": "", "config": {}}', "[" * 100_000])
def test_a_file_that_is_no_record_is_refused(content, tmp_path, refused):
    path = tmp_path / "in.json"
    path.write_text(content)
    assert f" {path} is not a record of labkit compare: " in (
        refused("compare", "--from", str(path))
    )


def test_the_stored_record_is_read():
    stored = Path(__file__).parents[2] / "data" / "results" / "compare.json"
    assert compare.load(stored)["runs"]


def test_a_contender_that_fails_makes_the_command_fail_after_the_table(monkeypatch, capsys):
    record = made_by_hand()
    row = {"contender": "Torch", "world_size": 4, "reason": "lost a rank", "failed": True}
    record["skipped"] = [row]
    monkeypatch.setattr(command, "compare", lambda **options: record)
    assert main(["compare"]) == 1
    assert "failed: Torch on 4 ranks: lost a rank" in capsys.readouterr().out
