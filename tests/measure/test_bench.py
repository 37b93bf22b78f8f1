"""The bench runs once, on small things: its contenders agree, and its record holds them all."""

import contextlib
import json
from types import SimpleNamespace

import pytest
import torch

from labkit.__main__ import main
from labkit.costs.link import Link, crossover_bytes
from labkit.units import format_bytes
from workbook.measure import all_reduce
from workbook.measure.bench import Result, bench_all_reduce, show

LINK = Link(50e-6, 2e-10, 1e-10)


def rows_of(tmp_path, *words):
    """Run a bench with --json; the rows of its record."""
    path = tmp_path / "record.json"
    words = ["bench", *words, "--device", "cpu", "--json", str(path)]
    assert main(words) == 0
    record = json.loads(path.read_text())
    assert record["command"] == " ".join(["labkit", *words])
    assert record["hardware"]["cores"] >= 1
    assert record["versions"]["torch"] == torch.__version__
    return record["rows"]


@pytest.mark.slow
def test_every_contender_of_the_all_reduce_bench_is_right(tmp_path):
    """A wrong sum would fail the run: each turn's result is checked on every rank."""
    words = ["--world-size", "3", "--sizes", "4,64KiB", "--repeats", "2"]
    found = rows_of(tmp_path, *words)
    names = {"fast", "direct", "fast ring", "ring", "tree", "naive"}
    names |= {"ring over gloo", "gloo", "labkit backend", "in place"}
    for size in (4, 2**16):
        assert {row["contender"] for row in found if row["size_bytes"] == size} == names


def test_the_figure_says_where_the_ring_overtakes_the_tree_by_the_model():
    contenders = {name: [1.0] for name in ("fast ring", "ring", "tree", "naive", "gloo")}
    figure = Result(4, {2**10: contenders, 2**20: contenders}, LINK).figure()
    assert format_bytes(crossover_bytes(4, LINK)) in figure.caption
    assert figure.png()


@contextlib.contextmanager
def guest(comm):
    """A contender from elsewhere, of which rank 0 alone has the time."""
    yield lambda num_bytes: 0.25 * num_bytes if comm.rank == 0 else 0.0


def test_a_guest_takes_turns_with_the_others():
    found = bench_all_reduce(2, (4,), 1, "cpu", guests={"MPI": guest})
    assert found.seconds[4]["MPI"] == [1.0]


def test_a_wrong_sum_ends_the_bench(monkeypatch):
    class Alone:
        rank, world_size, device = 0, 2, "cpu"
        transport = SimpleNamespace(shares_memory=False)

    monkeypatch.setattr(all_reduce, "timed", lambda comm, action: action() or 1.0)
    with pytest.raises(AssertionError, match="lazy: 8 bytes have a wrong sum"):
        all_reduce.checked_turns(Alone, 8, {"lazy": lambda tensor: None})["lazy"]()


def test_what_is_measured_is_written_when_a_bench_is_stopped(tmp_path):
    def stopped():
        yield Result(2, {4: {"ring": [1.0], "tree": [1.0]}}, LINK)
        raise KeyboardInterrupt

    path = tmp_path / "out.json"
    with pytest.raises(KeyboardInterrupt):
        show(stopped(), {"command": "c", "config": {}}, str(path))
    names = [row["contender"] for row in json.loads(path.read_text())["rows"]]
    assert names == ["ring", "tree"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sizes", "10"], "10 bytes do not divide into float32"),
        (["--world-size", "1"], "the world size of a bench must be an integer from 2 up"),
        (["--figure", "x.gif"], "a figure is saved as .png or .svg"),
    ],
)
def test_errors_of_use_are_one_line_and_exit_2(words, message, refused):
    assert message in refused("bench", *words)
