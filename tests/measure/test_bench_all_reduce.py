"""labkit bench all-reduce: on real ranks, then what follows from made-up seconds."""

import contextlib
import json
import math
from types import SimpleNamespace

import pytest
import torch

from labkit.__main__ import main
from labkit.costs.link import all_reduce_seconds, crossover_bytes
from workbook.measure import all_reduce, spread
from workbook.measure.all_reduce import AllReduceResult, bench_all_reduce
from workbook.measure.command import show
from workbook.measure.record import merged

KIB, MIB = 2**10, 2**20
ALPHA_S, BETA_S, GAMMA_S = 50e-6, 2e-10, 1e-10


@pytest.mark.slow
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
            paired = spread.ratios(rows["gloo"]["seconds"], row["seconds"])
            median = row["ratio_to"]["gloo"]["median"]
            assert median == pytest.approx(sum(paired) / 2, rel=1e-4)
            bus = 2 * 2 / 3 * size / row["time_s"]["median"]
            assert row["bus_bytes_per_s"] == pytest.approx(bus)
        assert rows["gloo"]["ratio_to"]["gloo"] == {"median": 1, "low": 1, "high": 1}
    assert {link["world_size"] for link in record["links"]} == {3}
    assert len(record["predictions"]) == len(record["links"]) * 2 * 3
    assert (record["crossovers"][0]["model_bytes"] or 0) >= 0
    out = capsys.readouterr().out
    assert "All-reduce of float32 in place, 3 ranks on cpu" in out
    assert "The ring overtakes the tree: model" in out


@contextlib.contextmanager
def guest(comm):
    """A contender from elsewhere, of which rank 0 alone has the time."""
    yield lambda num_bytes: 0.25 * num_bytes if comm.rank == 0 else 0.0


def test_a_guest_takes_turns_with_the_others():
    (result,) = bench_all_reduce((2,), (4,), repeats=2, device="cpu", guests={"MPI": guest})
    assert result.seconds[4]["MPI"] == [1.0, 1.0]
    assert result.references == ["gloo", "MPI"]
    assert "against MPI" in str(result)


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


def made_up(world_size: int = 4) -> AllReduceResult:
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
    seconds = {"messages": messages, "all_reduce": found}
    return AllReduceResult.of(seconds, world_size, "cpu")


def test_fit_predictions_and_crossover_are_those_of_the_cost_model():
    result = made_up()
    link = result.links["shared"]
    assert link.alpha_s == pytest.approx(ALPHA_S)
    assert link.beta_s_per_byte == pytest.approx(BETA_S)
    assert link.gamma_s_per_byte == pytest.approx(GAMMA_S)
    record = result.record()
    for line in record["predictions"]:
        expected = all_reduce_seconds(line["algorithm"], line["size_bytes"], 4, link)
        assert line["seconds"] == pytest.approx(expected)
    assert record["crossovers"][0]["model_bytes"] == pytest.approx(crossover_bytes(4, link))


def test_the_measured_crossover_is_where_the_medians_cross():
    (found,) = made_up().measured_crossovers_bytes()
    assert found == pytest.approx(64 * KIB)
    assert "measured 64 KiB" in str(made_up())


def test_a_model_without_a_crossover_is_null_in_json(monkeypatch):
    monkeypatch.setattr(all_reduce, "crossover_bytes", lambda *_: math.inf)
    record = made_up().record()
    assert record["crossovers"][0]["model_bytes"] is None
    json.dumps(record, allow_nan=False)
    assert "The ring overtakes the tree: model never" in str(made_up())


def test_ratios_are_to_those_that_took_part():
    result = made_up()
    assert result.references == ["gloo"]
    for by_name in result.seconds.values():
        by_name["MPI"] = [5e-4] * 3
    row = next(row for row in result.rows() if row["contender"] == "fast ring")
    medians = {name: ratio["median"] for name, ratio in row["ratio_to"].items()}
    assert medians == {"gloo": 2, "MPI": 0.5}


def test_the_record_of_several_world_sizes_has_the_rows_of_all():
    record = merged([made_up(2), made_up(4)])
    assert [row["world_size"] for row in record["rows"]] == [2] * 20 + [4] * 20


def test_the_figure_shows_measured_and_model_one_file_per_world_size(tmp_path, capsys):
    figure = made_up().figures()["4_ranks"]
    assert "model" in figure.alt
    assert "64 KiB" in figure.caption
    show([made_up(2), made_up(4)], {}, figure_path=str(tmp_path / "a.png"))
    show([made_up(4)], {}, figure_path=str(tmp_path / "b.svg"))
    drawn = sorted(path.name for path in tmp_path.iterdir() if path.stat().st_size > 1000)
    assert drawn == ["a_2_ranks.png", "a_4_ranks.png", "b.svg"]
    assert "figure: " in capsys.readouterr().out
