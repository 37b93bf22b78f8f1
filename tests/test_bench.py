"""The benches measure what they say; how fast is no test's business."""

import json

import pytest

from labkit import bench
from labkit.__main__ import main


def test_ratios_are_of_pairs():
    comparison = bench.Comparison("launch", 2, [1.0, 2.0, 1.0], [4.0, 4.0, 8.0])
    assert comparison.ratios == [4.0, 2.0, 8.0]
    assert "4.0 times as fast (2.0 to 8.0 in 3 pairs)" in str(comparison)


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


def test_an_unknown_bench_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "speed"])
    assert "unknown bench 'speed': choose one of launch" in capsys.readouterr().err
