"""labkit compare: what is run, what a record says, and the figures' claims."""

import json
import math
import os
import re
import sys
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
from workbook.measure.compare.contenders import Setting, find_contenders, settings_of
from workbook.measure.compare.measure import Comparison
from workbook.measure.compare.phases import epoch_windows, epochs_by_role, phases_by_role, short

pytestmark = pytest.mark.slow

MAIN = Setting(2, 100, 32, 3)


def contender(name, **more):
    one = {"name": name, "strategy": name, "builtin": False, "backend": "auto"}
    return one | {"counterpart": None, "own_pace": False} | more


def run_row(name, setting, repeat, seconds, accuracy=(0.5, 0.9, 0.96)):
    """A run whose first epoch takes 1 s more than the others."""
    took = [seconds + (epoch == 0) for epoch in range(len(accuracy))]
    epochs = [{"loss": 1.0, "test_accuracy": a, "seconds": s} for a, s in zip(accuracy, took)]
    spans = {"compute": 0.5 * seconds, "wait": 0.25 * seconds, "evaluate": 9.0}
    return {
        "contender": name,
        "setting": setting,
        "repeat": repeat,
        "epochs": epochs,
        "phases_s": {"worker": spans},
        "bytes_sent": None,
        "messages": None,
        "replicas_agree": True,
        "note": None,
        "difference_from_single": 1e-7,
    }


def made_by_hand():
    """ring takes 1 s an epoch, PyTorch 2 s and single 3 s; slower on 4 ranks, faster on half."""
    settings = [(2, 100, 32), (4, 100, 32), (2, 50, 32), (2, 100, 64)]
    names = ("world_size", "train_size", "batch_size")
    factors = (1.0, 3.0, 0.5, 0.8)
    runs = []
    for repeat, drift in enumerate((1.0, 2.0, 1.1)):
        for index, factor in enumerate(factors):
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
    classes = {strategies.get(name, builtin=True) for name in expected}
    classes -= {strategies.get("single")}
    assert {one.name.partition(" ")[0] for one in builtins} == {c.__name__ for c in classes}
    for one in found:
        if one.counterpart:
            assert one.counterpart in {other.name for other in builtins}


def test_the_counterpart_of_one_technique_runs_on_both_backends():
    found = find_contenders(("ring_all_reduce",), device="cpu")
    names = ["single", "ring_all_reduce", "TorchDDP", "TorchDDP (labkit)"]
    assert [one.name for one in found] == names
    assert [one.config(3).world_size for one in found] == [1, 3, 3, 3]
    assert found[3].config(3).backend == "labkit"


# What is run


def test_settings_differ_from_the_main_one_in_one_thing():
    found = settings_of((1, 2, 4), (25, 100), (16, 32, 64), 6, units=2)
    assert found[0] == Setting(2, 100, 32, 6)
    assert found[1:3] == [Setting(1, 100, 32, 3), Setting(4, 100, 32, 3)]
    assert found[3:] == [Setting(2, 25, 32, 3), Setting(2, 100, 16, 3), Setting(2, 100, 64, 3)]
    above = settings_of((3, 4), (9,), (8,), 1, units=2)
    assert above == [Setting(3, 9, 8, 1), Setting(4, 9, 8, 1)]
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
            # A rank's ValueError is a failure, too: a refusal comes before the ranks.
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
    one_rank = Setting(1, 100, 32, 3)
    compared = comparison([MAIN, one_rank])
    compared.run(repeats=2, budget_s=0)
    ring, single = "ring_all_reduce", "single"
    first = [(single, 1, 7), (ring, 2, 7), (ring, 2, 7), (ring, 2, 7)]
    # On one rank: ours refused, PyTorch's broke off on both backends; single has run already.
    first += [(ring, 1, 7)] * 3
    assert runs == [*first, (ring, 2, 8), (single, 1, 8)]
    reasons = {(row["contender"], row["world_size"]): row for row in compared.skipped}
    assert reasons[ring, 1]["reason"] == "needs a neighbour"
    assert not reasons[ring, 1]["failed"]
    assert reasons["TorchDDP", 2]["reason"] == "rank 1 raised"
    assert reasons["TorchDDP (labkit)", 2]["failed"]
    assert [row["contender"] for row in compared.runs] == [single, ring, ring, single]
    memory = [{"process_bytes": 5, "devices": {}}, None]
    assert [row["peak_memory"] for row in compared.runs] == [memory] * 4


def test_repeats_stop_when_the_budget_is_used_up_and_settings_left_out_are_recorded(
    runs, monkeypatch
):
    clock = iter(range(1000))
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    other = Setting(2, 50, 32, 3)
    compared = comparison([MAIN, other])
    # The clock ticks at each look: the first setting ends at 3 s.
    compared.run(repeats=None, budget_s=3)
    assert {row["setting"] for row in compared.runs} == {0}
    assert {row["repeat"] for row in compared.runs} == {0}
    (row,) = [row for row in compared.skipped if row["contender"] == "all contenders"]
    assert row["train_size"] == 50
    assert "budget" in row["reason"]


# Phases


def spans(*rows, rank=0):
    return [Span(rank, kind, start, end) for kind, start, end in rows]


def test_phases_leave_out_evaluation_and_the_first_epoch():
    worker = spans(
        *(("data", 0, 1), ("compute", 1, 5), ("evaluate", 5, 6), ("share_reduce", 6, 7)),
        *(("evaluate", 7, 8), ("data", 9, 10), ("compute", 10, 12), ("share_reduce", 12, 13)),
        ("evaluate", 14, 15),
    )
    assert epoch_windows(worker) == [(0, 5), (9, 14)]
    assert phases_by_role(Trace(tuple(worker)), epochs=2) == {
        "worker": {"compute": 2.0, "data": 1.0, "share_reduce": 1.0}
    }
    # Of one epoch there is no other to take.
    only = phases_by_role(Trace(tuple(worker[:3])), epochs=1)
    assert only == {"worker": {"compute": 4.0, "data": 1.0}}


def test_a_rank_that_computes_nothing_serves_and_own_pace_is_averaged_over_all_epochs():
    serves = spans(("wait", 0, 3), ("update", 3, 4), ("wait", 4, 8), ("evaluate", 8, 9))
    works = spans(("data", 0, 2), ("compute", 2, 8), rank=1)
    found = phases_by_role(Trace.merge([serves, works]), epochs=2)
    assert found == {
        "worker": {"compute": 3.0, "data": 1.0},
        "server": {"update": 0.5, "wait": 3.5},
    }


# What a record says


def test_an_epochs_time_leaves_out_the_first_and_time_to_target_counts_it():
    run = run_row("ring", 0, 0, 2.0)
    assert summary.epoch_seconds(run) == 2.0
    assert summary.epoch_seconds(run_row("ring", 0, 0, 2.0, accuracy=(0.9,))) == 3.0
    assert summary.to_target(run, 0.9) == (2, 5.0)
    assert summary.to_target(run, 0.97) is None


def test_ratios_are_of_pairs_so_drift_drops_out():
    record = made_by_hand()
    assert summary.against_pytorch(record, record["contenders"][1]) == [2.0, 2.0, 2.0]
    assert summary.against_pytorch(record, record["contenders"][2]) == []
    assert summary.epoch_times(record, "ring") == [1.0, 2.0, 1.1]


def test_efficiency_divides_by_the_devices_that_are_used():
    record = made_by_hand()
    on_cpu = summary.efficiency(record, "ring")
    assert on_cpu[2] == pytest.approx([3.0] * 3)
    assert on_cpu[4] == pytest.approx([1.0] * 3)
    record["config"]["gpus_used"] = 2
    on_gpus = summary.efficiency(record, "ring")
    assert on_gpus[2] == pytest.approx([1.5] * 3)
    assert on_gpus[4] == pytest.approx([0.5] * 3)
    assert "share the 2 cores" in summary.efficiency_rule(made_by_hand())
    assert "has 2 GPUs" in summary.efficiency_rule(record)


def test_phases_fill_the_epoch_and_no_more():
    record = made_by_hand()
    bars = summary.phases(record)
    assert bars["ring"] == pytest.approx({"compute": 0.55, "wait": 0.275, "other": 0.275})
    for run in record["runs"]:
        run["phases_s"] = {"worker": {"compute": 30.0, "scatter": 10.0}}
    assert summary.phases(record)["ring"] == pytest.approx({"compute": 0.825, "scatter": 0.275})


def test_the_figures_say_what_the_numbers_say():
    drawn = figures.draw(made_by_hand())
    assert set(drawn) == {
        *("curves", "curves_pytorch", "phases", "time_to_accuracy"),
        *("ranks", "efficiency", "train_size", "batch_size"),
    }
    said = {name: figure.caption for name, figure in drawn.items()}
    assert "the fastest epoch is that of ring: 1.1 s (one device: 3.3 s)" in said["ranks"]
    assert "Epoch on 4 ranks / epoch on 2: ring 3." in said["ranks"]
    assert "at 100 samples / epoch at 50, which is 2 times as many: ring 2." in said["train_size"]
    batches = "64 samples per batch / epoch at 32, which is 2 times as many: ring 0.8"
    assert batches in said["batch_size"]
    assert "ring 300% at 2, 100% at 4" in said["efficiency"]
    assert "share the 2 cores" in said["efficiency"]
    # Three epochs, the first 1 s longer: 3 x 1.1 + 1.
    first = "First at 95%: ring, after 4.3 s. Last: single, after 10.9 s."
    assert first in said["time_to_accuracy"]
    assert "medians of the repeats" in said["curves"]
    for name in ("ranks", "train_size", "batch_size"):
        assert "warm-up" in said[name]


def test_peak_memory_is_that_of_the_rank_or_gpu_with_the_most(tmp_path):
    record = made_by_hand()
    assert summary.peak_bytes(record, "ring") == []
    gpu = {"allocated_bytes": 3 * 2**20, "reserved_bytes": 2**30}
    of_rank = {
        "ring": [{"process_bytes": 2**20, "devices": {}}, None],
        "Torch": [{"process_bytes": 2**30, "devices": {"cuda:0": gpu}}] * 2,
        "single": [{"process_bytes": None, "devices": {}}],
    }
    for run in record["runs"]:
        run["peak_memory"] = of_rank[run["contender"]]
    path = tmp_path / "in.json"
    path.write_text(json.dumps(record))
    assert compare.load(path) == record
    assert summary.peak_bytes(record, "ring") == [2**20] * 3
    assert summary.peak_bytes(record, "Torch") == [3 * 2**20] * 3
    assert summary.peak_bytes(record, "single") == []
    report = summary.report(record)
    assert "1 MiB (1 MiB to 1 MiB)" in report
    assert "Peak memory is that of the rank" in report
    figure = figures.draw(record)["memory"]
    assert figure.caption.startswith("Least: ring, 1 MiB. Most: Torch, 3 MiB.")
    assert figure.figure.axes[0].get_xlabel() == "peak memory (MiB)"
    assert figure.png()


def test_ranks_that_only_serve_are_told():
    record = made_by_hand()
    assert summary.ranks_rule(record) == ""
    for run in record["runs"]:
        if run["contender"] == "ring":
            run["phases_s"]["server"] = {"wait": 1.0}
    assert "ranks of ring one only serves" in summary.report(record)
    assert "N ranks are N - 1 workers" in figures.by_ranks(record).caption
    assert {"ring: worker", "ring: server"} <= summary.phases(record).keys()


def test_stages_are_told_as_stages_and_serve_nobody():
    record = made_by_hand()
    for run in record["runs"]:
        if run["contender"] != "single":
            run["phases_s"] = {"stage": {"forward": 0.2, "backward": 0.4, "communicate": 0.1}}
    told = "The ranks of ring, Torch share the layers, not the batch: N ranks are N stages."
    assert summary.ranks_rule(record) == told
    assert told in summary.report(record)
    assert told in figures.by_ranks(record).caption
    # Its messages have spans of their own.
    assert "is part of compute" not in figures.epoch_phases(record).caption
    assert "Communication of Torch, if any, is" in figures.epoch_phases(made_by_hand()).caption


@pytest.mark.parametrize("name", strategies.STRATEGIES)
@pytest.mark.parametrize("builtin", [False, True], ids=["ours", "PyTorch's"])
def test_the_roles_of_every_technique_s_ranks(name, builtin):
    settings = {"world_size": 1 if name == "single" else 3, "device": "cpu", "train_size": 64}
    result = train_with(name, builtin=builtin, model="mlp", **settings)
    expected = {"worker", "server"} if "parameter_server" in name else {"worker"}
    expected = {"stage"} if name in STAGED else expected
    assert phases_by_role(result.trace, epochs=1).keys() == expected
    halves = [result.epochs[0]["seconds"] / 2] * 2
    by_epoch = epochs_by_role(result.trace, halves)
    assert by_epoch.keys() == expected
    assert all(len(rows) == 2 for rows in by_epoch.values())


def test_a_target_that_is_never_reached_is_told_and_drawn(tmp_path):
    record = made_by_hand()
    record["config"]["target"] = 0.99
    assert summary.reached(record, "ring") is None
    assert "not reached" in summary.report(record)
    figure = figures.time_to_accuracy(record)
    assert "Not reached in every repeat within 3 epochs: single, ring, Torch." in figure.caption
    assert figure.save(tmp_path / "a.png").stat().st_size > 1000


def test_a_record_without_other_settings_or_builtins_is_drawn_too():
    record = made_by_hand()
    record["settings"] = record["settings"][:1]
    record["runs"] = [
        run for run in record["runs"] if run["setting"] == 0 and run["contender"] == "single"
    ]
    assert set(figures.draw(record)) == {"curves", "phases", "time_to_accuracy"}
    assert "Efficiency" not in summary.report(record)


def test_what_did_not_run_is_not_drawn():
    record = made_by_hand()
    runs = record["runs"]
    record["runs"] = [run for run in runs if run["contender"] != "single"]
    assert "efficiency" not in figures.draw(record)
    record["runs"] = [run for run in runs if run["contender"] != "ring" or run["setting"] == 0]
    caption = figures.draw(record)["train_size"].caption
    assert "Only the runs with 100 samples have times" in caption
    record["runs"] = []
    assert figures.draw(record) == {}
    assert "mlp on digits" in summary.report(record)


def test_bytes_stand_in_the_table_where_they_are_counted():
    record = made_by_hand()
    for run in record["runs"]:
        run["bytes_sent"] = [2048, 4096] if run["contender"] == "ring" else None
    _, table, *_ = summary.report(record).split("\n\n")
    rows = {line.split()[0]: re.split("  +", line.strip()) for line in table.splitlines()}
    sent = {name: cells[-2] for name, cells in rows.items()}
    assert sent == {"contender": "sent per rank", "single": "-", "ring": "4 KiB", "Torch": "-"}
    # Older records have no memory.
    peaks = {name: cells[-1] for name, cells in rows.items()}
    assert peaks == {"contender": "peak memory", "single": "-", "ring": "-", "Torch": "-"}


def test_learning_curves_of_repeats_have_a_band():
    figure = figures.curves(made_by_hand()).figure
    axes = figure.axes[3]
    single, ring = axes.lines[:2]
    assert len(axes.collections) == 2
    assert list(single.get_xdata()) == pytest.approx([4.3, 7.6, 10.9])
    assert list(ring.get_xdata()) == pytest.approx([2.1, 3.2, 4.3])


# The command


def test_a_run_is_recorded_and_from_says_and_draws_the_same(tmp_path, capsys):
    """On real ranks: three contenders and single, one setting, one epoch of 60 samples."""
    path, pictures = tmp_path / "out.json", tmp_path / "figures"
    pictures.mkdir()
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
        assert run["phases_s"]["worker"]["compute"] > 0
        assert run["epoch_phases_s"]["worker"][0]["compute"] > 0
        assert 0 <= run["epochs"][0]["train_accuracy"] <= 1
        assert "phases_s" not in run["epochs"][0]
    assert {"share_reduce", "share_only"} <= record["runs"][1]["phases_s"]["worker"].keys()
    (loading,) = record["loading"]
    assert (loading["train_size"], len(loading["seconds"])) == (60, 5)
    assert record["hardware"]["cores"] >= 1
    assert record["versions"]["torch"]
    assert main(["compare", "--from", str(path), "--figures", str(pictures)]) == 0
    again = capsys.readouterr().out
    assert again.startswith(said[said.index("mlp on digits: 60 samples") :])
    names = ["curves", "curves_pytorch", "phases", "time_to_accuracy", "epochs", "loading"]
    # Where the system tells no peak, there is none to draw.
    names += ["memory"] if summary.peak_bytes(record, "single") else []
    assert not sys.platform.startswith("linux") or "memory" in names
    drawn = {file.name for file in pictures.iterdir()}
    assert drawn == {f"compare_{name}.png" for name in names}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--strategies", "magic"], "unknown strategy 'magic'"),
        (["--world-size", "two"], "--world-size: invalid literal for int() with base 10: 'two'"),
        (["--target", "high"], "--target: takes a percentage such as 95, got 'high'"),
        (["--target", "950"], "the target, an accuracy, must be at most 1, got 9.5"),
        (["--model", "gpt"], "unknown model 'gpt': choose one of small_cnn"),
        (["--batch-size", "2", "--world-size", "4"], "smaller than world_size 4"),
        (["--train-size", "99999"], "digits has 1437 training samples"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--json", "/nowhere/out.json"], "in a folder that exists"),
        (["--figures", "/nowhere"], "give a folder that exists"),
        (["--from", "/nowhere/in.json"], "No such file"),
        (["--from", "x.json", "--epochs", "3"], "cannot change it: drop --epochs"),
    ],
)
def test_errors_of_use_are_one_line_and_exit_2(words, message, refused):
    assert message in refused("compare", *words)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a record of labkit compare: Expecting property name"),
        ("\udcff", "codec can't decode byte 0xff"),
        ("[]", "$: [] is not of type 'object'; give a file that its --json wrote"),
        ('{"command": "", "config": {}}', "is a required property"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
        ('{"a":' + "[" * 30 + "]" * 30 + "}", "it is nested more than 20 deep"),
        ('{"a": NaN}', "NaN is not a finite number"),
        ('{"a": -Infinity}', "-Infinity is not a finite number"),
        ('{"a": 1e999}', "1e999 is not a finite number"),
        ("9" * 5000, "Exceeds the limit"),
        ("\0", "Expecting value"),
    ],
)
def test_a_file_that_is_no_record_is_refused(content, message, tmp_path, refused):
    path = tmp_path / "in.json"
    path.write_text(content, errors="surrogateescape")
    line = refused("compare", "--from", str(path))
    assert f" {path} is not a record of labkit compare: " in line
    assert message in line


def test_what_is_no_file_is_refused_and_never_waited_for(tmp_path, refused):
    os.mkfifo(tmp_path / "pipe")
    assert "it is a pipe or a device" in refused("compare", "--from", str(tmp_path / "pipe"))
    assert "Is a directory" in refused("compare", "--from", str(tmp_path))


@pytest.mark.parametrize(
    ("places", "value", "message"),
    [
        (("config", "target"), 10**40, "is greater than the maximum"),
        (("settings", 0, "world_size"), 10**30, "is greater than the maximum"),
        (("runs", 3, "repeat"), 1e30, "is greater than the maximum"),
        (("config", "target"), "95", "$.config.target: '95' is not of type 'number'"),
        (("settings",), [], "$.settings: [] should be non-empty"),
        (("settings", 1, "batch_size"), 0, "$.settings[1].batch_size: 0 is less than the minimum"),
        (("contenders", 1, "own_pace"), None, "own_pace: None is not of type 'boolean'"),
        (("runs", 3), {}, "$.runs[3]: 'contender' is a required property"),
        (("runs", 3, "setting"), 4, "$.runs[3].setting: 4 is not among settings 0 to 3"),
        (("runs", 3, "repeat"), True, "$.runs[3].repeat: True is not of type 'integer'"),
        (("runs", 3, "contender"), "me", "$.runs[3]: me is not a contender"),
        (("runs", 3, "epochs"), [], "$.runs[3].epochs: [] should be non-empty"),
        (("runs", 3, "epochs", 1, "seconds"), -1, "$.runs[3].epochs[1].seconds: -1 is less"),
        (("runs", 3, "epochs", 1), [1], "$.runs[3].epochs[1]: [1] is not of type 'object'"),
        (("runs", 3, "phases_s", "worker"), {"wait": ""}, "worker.wait: '' is not of type"),
        (("runs", 3, "difference_from_single"), "", "difference_from_single: '' is not of"),
        (("runs", 3, "peak_memory"), [{"devices": {}}], "'process_bytes' is a required"),
        (("skipped",), ["x"], "$.skipped[0]: 'x' is not of type 'object'"),
        (("hardware", "gpus"), 2, "$.hardware.gpus: 2 is not of type 'array'"),
    ],
)
def test_a_damaged_record_is_refused_at_the_place(places, value, message, tmp_path):
    damaged = made_by_hand()
    *path, last = places
    part = damaged
    for place in path:
        part = part[place]
    part[last] = value
    file = tmp_path / "in.json"
    file.write_text(json.dumps(damaged))
    with pytest.raises(ValueError, match=re.escape(message)):
        compare.load(file)


def test_whole_records_are_read(tmp_path):
    """The one in the repository, and one without a single device to be compared with."""
    file = tmp_path / "in.json"
    record = made_by_hand()
    del record["runs"][0]["difference_from_single"]
    file.write_text(json.dumps(record))
    assert compare.load(file) == record
    stored = Path(__file__).parents[2] / "data" / "results" / "compare.json"
    assert compare.load(stored)["runs"]


def test_a_run_that_diverged_is_recorded_read_and_drawn(tmp_path):
    """JSON has no NaN: it is null there, and such a run does not equal one device."""
    record, path = made_by_hand(), tmp_path / "in.json"
    run = record["runs"][1]
    run["epochs"][-1]["loss"] = short(math.nan)
    run["difference_from_single"] = None
    path.write_text(json.dumps(record, allow_nan=False))
    read = compare.load(path)
    assert "not finite" in summary.report(read)
    assert figures.draw(read)


def test_a_stop_ends_with_130_and_leaves_the_old_record(tmp_path, monkeypatch, capsys):
    path = tmp_path / "out.json"
    path.write_text("old")

    def stopped(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "train_run", stopped)
    assert main(["compare", "--strategies", "ring_all_reduce", "--json", str(path)]) == 130
    assert "stopped; all ranks have ended" in capsys.readouterr().err
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_a_contender_that_fails_makes_the_command_fail_after_the_table(monkeypatch, capsys):
    record = made_by_hand()
    row = {"contender": "Torch", "world_size": 4, "reason": "lost a rank", "failed": True}
    record["skipped"] = [row]
    monkeypatch.setattr(command, "compare", lambda **options: record)
    assert main(["compare"]) == 1
    assert "failed: Torch on 4 ranks: lost a rank" in capsys.readouterr().out
