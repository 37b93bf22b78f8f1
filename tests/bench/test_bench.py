"""The benches measure what they say; how fast is no test's business."""

import contextlib
import importlib.util
import json
import math
import os
import socket
from types import SimpleNamespace

import pytest
import torch

import labkit.bench.mpi as mpi
from labkit import bench
from labkit.__main__ import main
from labkit.bench import all_reduce, all_reduce_result, ddp, turns
from labkit.bench.all_reduce_result import AllReduceResult
from labkit.bench.machine import Memory
from labkit.costs.seconds import all_reduce_seconds, crossover_bytes

KIB, MIB = 2**10, 2**20
ALPHA_S, BETA_S, GAMMA_S = 50e-6, 2e-10, 1e-10


# The rules: turns, ratios, spreads.


def test_each_repeat_begins_with_another_contender(monkeypatch):
    monkeypatch.setattr(turns, "agree", lambda comm, number: number)
    called = []
    contenders = {name: lambda name=name: called.append(name) or 1.0 for name in "abc"}
    seconds = turns.take_turns(None, contenders, 4, budget_s=60)
    assert "".join(called) == "abc" + "abc" + "abc" + "bca" + "cab" + "abc"
    assert seconds == {name: [1.0] * 4 for name in "abc"}


def test_what_takes_long_gets_fewer_repeats_but_never_too_few(monkeypatch):
    monkeypatch.setattr(turns, "agree", lambda comm, number: number)
    seconds = turns.take_turns(None, {"a": lambda: 1.0}, 100, budget_s=0)
    assert len(seconds["a"]) == turns.FEWEST_REPEATS


def test_a_turn_lasts_until_the_last_rank_has_ended():
    by_rank = [{8: {"a": [1.0, 5.0]}}, {8: {"a": [2.0, 3.0]}}, {8: {"a": [0.0, 4.0]}}]
    assert turns.slowest(by_rank) == {8: {"a": [2.0, 5.0]}}


def test_a_spread_is_the_median_and_the_quartiles():
    spread = turns.Spread.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (spread.low, spread.median, spread.high) == (2.0, 3.0, 4.0)
    assert spread.text(str) == "3.0 (2.0 to 4.0)"
    assert turns.Spread.of([7.0]).text(str) == "7.0 (7.0 to 7.0)"


def test_ratios_are_of_pairs():
    comparison = bench.Comparison("launch", 2, [1.0, 2.0, 1.0], [4.0, 4.0, 8.0])
    assert comparison.ratios == [4.0, 2.0, 8.0]
    assert "4.0 times as fast (2.0 to 8.0 in 3 pairs)" in str(comparison)


def test_a_table_is_aligned_and_an_empty_row_is_an_empty_line():
    lines = turns.table(["size", "x"], [["1 KiB", "2"], [], ["", "33"]]).splitlines()
    assert lines == ["size   x", "1 KiB  2", "", "       33"]


@pytest.mark.parametrize("fails", ["the second group", "a step", "nothing"])
def test_process_groups_end_whatever_is_raised(fails, monkeypatch):
    made, ended = [], []

    def new_group(backend):
        if fails == "the second group" and made:
            raise RuntimeError(fails)
        made.append(backend)
        return SimpleNamespace(shutdown=lambda: ended.append(backend))

    monkeypatch.setattr(turns.dist, "new_group", new_group)
    comm = SimpleNamespace(device=torch.device("cpu"), world_size=2)
    expected = contextlib.nullcontext()
    if fails != "nothing":
        expected = pytest.raises(RuntimeError, match=fails)
    with expected, turns.process_groups(comm) as groups:
        assert list(groups) == ["gloo", "labkit"]
        assert not ended
        if fails == "a step":
            raise RuntimeError(fails)
    assert ended == made
    assert len(made) == (1 if fails == "the second group" else 2)


# launch


@pytest.mark.fresh
def test_both_sides_of_the_launch_bench_do_the_work():
    bench.run_ours(2)
    bench.run_spawned(1)


def test_a_record_names_command_hardware_and_versions(tmp_path, monkeypatch, capsys):
    fake = [bench.Comparison("launch", 2, [1.0], [3.0])]
    monkeypatch.setitem(bench.BENCHES, "launch", lambda: fake)
    path = tmp_path / "launch.json"
    assert main(["bench", "launch", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["command"] == "labkit bench launch"
    assert record["comparisons"][0]["ratios"] == [3.0]
    assert {"hardware", "versions"} <= record.keys()
    assert "3.0 times as fast" in capsys.readouterr().out


# all-reduce: on real ranks, then what follows from made-up seconds


def test_every_contender_of_the_all_reduce_bench_is_right_and_recorded(tmp_path, capsys):
    """A wrong sum would fail the run: each turn's result is checked on every rank."""
    path = tmp_path / "all_reduce.json"
    words = ["--world-size", "3", "--sizes", "4,64KiB", "--repeats", "2", "--device", "cpu"]
    assert main(["bench", "all-reduce", *words, "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert record["command"] == f"labkit bench all-reduce {' '.join(words)}"
    assert record["config"]["sizes_bytes"] == [4, 64 * KIB]
    assert record["hardware"]["cores"] >= 1
    assert record["versions"]["torch"] == torch.__version__
    names = {"fast ring", "ring", "tree", "naive", "gloo", "labkit backend"}
    for size in (4, 64 * KIB):
        rows = {r["contender"]: r for r in record["rows"] if r["size_bytes"] == size}
        assert names <= rows.keys()
        for row in rows.values():
            assert len(row["seconds"]) == 2
            assert row["time_s"]["median"] == pytest.approx(sum(row["seconds"]) / 2, rel=1e-4)
            paired = turns.ratios(rows["gloo"]["seconds"], row["seconds"])
            median = row["ratio_to"]["gloo"]["median"]
            assert median == pytest.approx(sum(paired) / 2, rel=1e-4)
            bus = 2 * 2 / 3 * size / row["time_s"]["median"]
            assert row["bus_bytes_per_s"] == pytest.approx(bus)
        assert rows["gloo"]["ratio_to"]["gloo"] == {"median": 1, "low": 1, "high": 1}
    assert {link["world_size"] for link in record["links"]} == {3}
    assert len(record["predictions"]) == len(record["links"]) * 2 * 3
    assert record["memory"][0]["copy_bytes_per_s"] > 0
    assert [one["world_size"] for one in record["mpi"]] == [3]
    assert record["crossovers"][0]["model_bytes"] is None or (
        record["crossovers"][0]["model_bytes"] >= 0
    )
    out = capsys.readouterr().out
    assert "All-reduce of float32 in place, 3 ranks on cpu" in out
    assert "The ring overtakes the tree: model" in out


@pytest.mark.parametrize(
    "wrong",
    [
        lambda tensor: tensor,
        lambda tensor: tensor.mul(3),
        lambda tensor: tensor.copy_(tensor.mul(3).roll(len(tensor) // 2)),
        lambda tensor: tensor[:-1].mul_(3),
    ],
    ids=["nothing done", "result returned, not in place", "chunks swapped", "last one left out"],
)
def test_a_wrong_sum_fails_the_bench(wrong, monkeypatch):
    monkeypatch.setattr(all_reduce, "timed", lambda comm, action: (action(), 1.0)[1])
    comm = SimpleNamespace(rank=0, world_size=2, device=torch.device("cpu"))
    tensors = all_reduce.Tensors(comm, 64 * KIB)
    assert tensors.turn("right", lambda tensor: tensor.mul_(3)) > 0
    with pytest.raises(AssertionError, match="mine: 65536 bytes have a wrong sum"):
        tensors.turn("mine", wrong)


def made_up(world_size: int = 4, missing: str = "no MPI here") -> AllReduceResult:
    """Messages exactly on the line; tree and ring cross at 64 KiB; gloo is twice as slow."""
    sizes = [KIB, 16 * KIB, 256 * KIB, 4 * MIB]
    messages = {
        size: {"shared": [ALPHA_S + BETA_S * size] * 2, "add": [GAMMA_S * size] * 2}
        for size in sizes
    }
    times = {
        "fast ring": [1e-3] * 4,
        "ring": [2e-4, 2e-4, 2e-4, 2e-4],
        "tree": [1e-4, 1e-4, 4e-4, 9e-4],
        "naive": [1e-2] * 4,
        "gloo": [2e-3] * 4,
    }
    found = {
        size: {name: [seconds[n]] * 3 for name, seconds in times.items()}
        for n, size in enumerate(sizes)
    }
    # 4 ranks, 64 MiB each: 128 MiB copied, 192 MiB added.
    memory = {"copy": [128 * MIB * world_size / 20e9], "add": [192 * MIB * world_size / 40e9]}
    seconds = {"memory": memory, "messages": messages, "all_reduce": found}
    return AllReduceResult.of(seconds, world_size, "cpu", mpi.Found(missing=missing))


def test_the_fit_finds_what_the_messages_cost():
    link = made_up().links["shared"]
    assert link.alpha_s == pytest.approx(ALPHA_S)
    assert link.beta_s_per_byte == pytest.approx(BETA_S)
    assert link.gamma_s_per_byte == pytest.approx(GAMMA_S)


def test_predictions_and_crossover_are_those_of_the_cost_model():
    result = made_up()
    link = result.links["shared"]
    record = result.record()
    for line in record["predictions"]:
        expected = all_reduce_seconds(line["algorithm"], line["size_bytes"], 4, link)
        assert line["seconds"] == pytest.approx(expected)
    assert record["crossover"]["model_bytes"] == pytest.approx(crossover_bytes(4, link))


def test_the_measured_crossover_is_where_the_medians_cross():
    (found,) = made_up().measured_crossovers_bytes()
    assert found == pytest.approx(64 * KIB)
    assert "measured 64 KiB" in str(made_up())


def test_a_model_without_a_crossover_is_null_in_json(monkeypatch):
    monkeypatch.setattr(all_reduce_result, "crossover_bytes", lambda *_: math.inf)
    record = made_up().record()
    assert record["crossover"]["model_bytes"] is None
    json.dumps(record, allow_nan=False)
    assert "The ring overtakes the tree: model never" in str(made_up())


def test_the_limit_is_each_tensor_read_once_and_written_once():
    result = made_up()
    assert result.memory == Memory(4, pytest.approx(20e9), pytest.approx(40e9))
    row = next(row for row in result.rows() if row.contender == "fast ring")
    assert row.limit_s == pytest.approx(2 * 4 * row.size_bytes / 40e9)
    assert row.share_of_limit == pytest.approx(row.limit_s / 1e-3)


def test_ratios_are_to_those_that_took_part():
    result = made_up()
    assert result.references == ["gloo"]
    for by_name in result.seconds.values():
        by_name["MPI"] = [5e-4] * 3
    row = next(row for row in result.rows() if row.contender == "fast ring")
    assert {name: ratio.median for name, ratio in row.ratios.items()} == {"gloo": 2, "MPI": 0.5}
    assert "against MPI" in str(result)


def test_a_missing_mpi_is_said_with_its_reason():
    assert "MPI takes no part: no MPI here." in str(made_up())
    assert "MPI" not in str(made_up(missing=""))


def test_each_world_size_records_its_own_mpi():
    both = [made_up(2, missing=""), made_up(4, missing="no slots here")]
    assert all_reduce_result.record(both)["mpi"] == [
        {"world_size": 2, "library": "", "missing": ""},
        {"world_size": 4, "library": "", "missing": "no slots here"},
    ]


def test_the_figure_shows_measured_and_model_one_file_a_world_size(tmp_path):
    figure = made_up().figure()
    assert "model" in figure.alt
    assert "64 KiB" in figure.caption
    both = all_reduce_result.draw([made_up(2), made_up(4)], tmp_path / "a.png")
    assert [path.name for path in both] == ["a_2_ranks.png", "a_4_ranks.png"]
    (alone,) = all_reduce_result.draw([made_up(4)], tmp_path / "b.svg")
    assert alone.name == "b.svg"
    assert all(path.stat().st_size > 1000 for path in (*both, alone))


# MPI


def test_a_machine_without_mpi_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert mpi.find(2).missing == "mpi4py is not installed"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PATH", "")
    assert mpi.find(2).missing == "there is no mpirun"


def test_an_mpi_that_does_not_run_is_no_contender(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho a line >&2\necho no slots here >&2\nexit 1\n")
    fake.chmod(0o755)
    assert mpi.find(2).missing == "no slots here"
    fake.write_text("#!/bin/sh\necho 1 Some MPI\n")
    assert mpi.find(2).missing == "asked for 2 ranks of one run, mpirun made 1"


def test_an_mpirun_that_ends_at_once_is_said_with_its_code(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\nexit 3\n")
    fake.chmod(0o755)
    message = "^mpirun ended with code 3 after 0 of 2 ranks had come$"
    with pytest.raises(RuntimeError, match=message), mpi.started(2):
        pass


@pytest.mark.parametrize("code", [None, 3], ids=["too late", "mpirun ended"])
def test_mpi_ranks_are_waited_for_only_while_some_are_missing(code, monkeypatch, tmp_path):
    monkeypatch.setattr(mpi, "_PATIENCE_S", 0.0)
    process = SimpleNamespace(poll=lambda: code)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(tmp_path / "turns"))
        listener.listen(2)

        def come():
            rank = stack.enter_context(socket.socket(socket.AF_UNIX))
            rank.connect(listener.getsockname())

        come()
        message = "^1 of 2 MPI ranks came in 0 s$"
        if code is not None:
            message = "^mpirun ended with code 3 after 1 of 2 ranks had come$"
        with pytest.raises(RuntimeError, match=message):
            mpi._accept(listener, 2, process)
        come()
        come()
        accepted = mpi._accept(listener, 2, process)
        assert len([stack.enter_context(connection) for connection in accepted]) == 2


def test_mpi_ranks_take_their_turns_where_an_mpi_is_installed():
    found = mpi.find(2)
    if found.missing:
        pytest.skip(found.missing)
    with mpi.started(2) as ranks:
        assert ranks.all_reduce(4 * KIB) > 0
        assert ranks.all_reduce(4) > 0


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
        paired = turns.ratios(rows["gloo"]["seconds"], row["seconds"])
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
    result = ddp._result(by_rank, "small_cnn", 2, "cpu")
    assert result.replicas_equal == {"gloo": True, "labkit": False}
    assert result.gradient_error["labkit"] == 0.1
    assert result.times_gloo("labkit") == [2.0, 2.0]
    assert "DIFFERENT" in str(result)


# The command line


def test_numbers_lie_on_one_line_of_the_record():
    record = {"seconds": [1e-05, 2.0, -3], "rows": [{"a": []}, {"b": [[1], None]}]}
    text = bench._dumped(record)
    assert json.loads(text) == record
    assert '"seconds": [ 1e-05, 2.0, -3 ]' in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["speed"], "unknown bench 'speed': choose one of launch, all-reduce, ddp"),
        (["all-reduce", "--sizes", "4KB"], "size '4KB' is not known: give bytes, or KiB"),
        (["all-reduce", "--sizes", "4KiB,,1"], "size '' is not known"),
        (["all-reduce", "--sizes", "10"], "10 bytes are no whole number of float32"),
        (["all-reduce", "--sizes", "0"], "0 bytes are no whole number of float32"),
        (["all-reduce", "--world-size", "1"], "2 ranks or more, got world size 1"),
        (["all-reduce", "--world-size", "two"], "--world-size: 'two' is not an integer"),
        (["all-reduce", "--repeats", "0"], "repeats must be an integer from 1 up, got 0"),
        (["all-reduce", "--device", "tpu"], "device 'tpu' is not known"),
        (["all-reduce", "--figure", "x.gif"], "a figure is saved as .png or .svg"),
        (["all-reduce", "--json", "/nowhere/x.json"], "in a folder that exists"),
        (["launch", "--sizes", "4KiB"], "bench launch has no option --sizes"),
        (["ddp", "--figure", "x.png"], "bench ddp draws no figure"),
        (["ddp", "--models", "gpt"], "unknown model 'gpt': choose some of small_cnn"),
        (["ddp", "--world-size", "1"], "2 ranks or more, got world size 1"),
        (["--json", "x.json"], "--json and --figure are of one bench"),
    ],
)
def test_errors_of_use_are_one_line_and_exit_2(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["bench", *words])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("labkit: error: ")
    assert message in line
