"""The command labkit bench and its records; the launch and the ddp bench."""

import json

import pytest
import torch

from labkit.__main__ import main
from workbook.measure import BENCHES, checkpoint, ddp, launch
from workbook.measure.model_step import build
from workbook.measure.record import command_line, dumped
from workbook.measure.spread import ratios
from workbook.measure.turns import ON_CPU


def test_a_launch_is_compared_pair_by_pair():
    result = launch.LaunchResult("launch", 2, [1.0, 2.0, 1.0], [4.0, 4.0, 8.0])
    assert result.ratios == [4.0, 2.0, 8.0]
    assert "4.0 times as fast (2.0 to 8.0 in 3 pairs)" in str(result)


@pytest.mark.fresh
def test_both_sides_of_the_launch_bench_do_the_work():
    launch.run_ours(2, ON_CPU)
    launch.run_spawned(1, ON_CPU)


def test_a_record_names_command_hardware_and_versions(tmp_path, monkeypatch, capsys):
    fake = [launch.LaunchResult("launch", 2, [1.0], [3.0])]
    monkeypatch.setitem(BENCHES, "launch", lambda: fake)
    path = tmp_path / "launch.json"
    assert main(["bench", "launch", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["command"] == "labkit bench launch"
    assert record["comparisons"][0]["ratios"] == [3.0]
    assert {"hardware", "versions"} <= record.keys()
    assert "3.0 times as fast" in capsys.readouterr().out


# ddp


def test_ddp_has_the_gradients_of_gloo_and_equal_replicas(tmp_path, capsys):
    path = tmp_path / "ddp.json"
    words = ["--models", "small_cnn", "--repeats", "2", "--device", "cpu"]
    assert main(["bench", "ddp", *words, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    rows = {row["backend"]: row for row in record["rows"]}
    assert list(rows) == ["gloo", "labkit", "labkit ddp"]
    for row in rows.values():
        assert row["model"] == "small_cnn"
        assert row["gradient_error"] < 1e-6
        assert row["replicas_equal"]
        assert len(row["seconds"]) == 2
        paired = ratios(rows["gloo"]["seconds"], row["seconds"])
        assert row["ratio_to"]["gloo"]["median"] == pytest.approx(sum(paired) / 2, rel=1e-4)
    assert {"hardware", "versions", "config"} <= record.keys()
    assert "DDP step of small_cnn" in capsys.readouterr().out


def test_a_gradient_that_differs_is_seen_relative_to_the_largest():
    mine, theirs = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(2, 1, bias=False)
    mine.weight.grad, theirs.weight.grad = torch.tensor([[4.0, 1.0]]), torch.tensor([[4.0, 0.0]])
    assert ddp.gradient_error(mine, theirs) == 0.25
    assert ddp.gradient_error(theirs, theirs) == 0.0


def test_replicas_that_part_are_said_to_differ():
    by_rank = [
        {
            "num_parameters": 3,
            "seconds": {"gloo": [1.0, 1.0], "labkit": [0.5, 0.5]},
            "error": {"gloo": 0.0, "labkit": rank / 10},
            "digest": {"gloo": "x", "labkit": f"y{rank}"},
        }
        for rank in range(2)
    ]
    result = ddp.put_together(by_rank, "small_cnn", "cpu")
    assert result.replicas_equal == {"gloo": True, "labkit": False}
    assert result.gradient_error["labkit"] == 0.1
    assert result.times_gloo("labkit") == [2.0, 2.0]
    assert "DIFFERENT" in str(result)


# checkpoint


def test_a_checkpoint_is_timed_beside_a_plain_file(tmp_path, capsys):
    path = tmp_path / "checkpoint.json"
    words = ["--models", "small_cnn", "--repeats", "2", "--device", "cpu", "--world-size", "2"]
    assert main(["bench", "checkpoint", *words, "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    # Parameters and momenta.
    parameters = sum(one.nbytes for one in build("small_cnn").parameters())
    assert row["num_bytes"] == 2 * parameters
    assert [len(row["seconds"][name]) for name in (checkpoint.SAVE, checkpoint.PLAIN)] == [2, 2]
    assert "as long as a plain file" in capsys.readouterr().out


# The command line


def test_a_row_of_the_record_is_a_line():
    record = {"config": {"a": [2]}, "rows": [{"a": [1e-05, None]}, {"b": {"c": -3}}], "none": []}
    text = dumped(record)
    assert json.loads(text) == record
    assert '    {"a": [1e-05, null]},\n    {"b": {"c": -3}}\n' in text


def test_the_recorded_command_leaves_out_where_it_wrote():
    words = ["bench", "ddp", "--json", "a.json", "--models", "mlp", "--figure=a.png"]
    assert command_line(words) == "labkit bench ddp --models mlp"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["speed"], "unknown bench 'speed': choose one of launch, all-reduce, ddp"),
        (["all-reduce", "--sizes", "4KB"], "size '4KB' is not known: give bytes, or KiB"),
        (["all-reduce", "--sizes", "10"], "10 bytes are not a whole number of float32"),
        (["all-reduce", "--world-size", "1"], "2 ranks or more, got world size 1"),
        (["all-reduce", "--world-size", "two"], "--world-size: invalid literal for int() with base 10: 'two'"),
        (["all-reduce", "--device", "tpu"], "unknown device 'tpu'"),
        (["all-reduce", "--figure", "x.gif"], "a figure is saved as .png or .svg"),
        (["all-reduce", "--json", "/nowhere/x.json"], "in a folder that exists"),
        (["launch", "--sizes", "4KiB"], "bench launch has no option --sizes"),
        (["ddp", "--figure", "x.png"], "bench ddp draws no figure"),
        (["ddp", "--models", "gpt"], "unknown model 'gpt': choose one of small_cnn"),
        (["ddp", "--world-size", "1"], "2 ranks or more, got world size 1"),
        (["pipeline", "--world-size", "1"], "2 ranks or more, got world size 1"),
        (["--json", "x.json"], "--json and --figure are for one bench"),
    ],
)
def test_errors_of_use_are_one_line_and_exit_2(words, message, refused):
    assert message in refused("bench", *words)
