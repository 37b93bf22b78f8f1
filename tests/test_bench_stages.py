"""The benches of placements and pipelines: contenders train alike, and times become ratios."""

import json

import pytest

from labkit.__main__ import main
from labkit.bench import placement
from labkit.bench.pipeline import ONE_DEVICE, OURS, TORCH, PipelineResult, bench_pipeline
from labkit.costs import Link
from labkit.placement import LayerCost, Profile
from labkit.split_runs import MeasuredSplit
from labkit.trace import Trace


def test_every_contender_of_the_pipeline_bench_trains_the_same_model(tmp_path, capsys):
    path = tmp_path / "pipeline.json"
    assert (
        main(["bench", "pipeline", "--models", "mlp", "--repeats", "2", "--json", str(path)]) == 0
    )
    rows = {row["contender"]: row for row in json.loads(path.read_text())["rows"]}
    assert {OURS, TORCH, ONE_DEVICE, "labkit gpipe on gloo", "torch 1f1b on gloo"} <= rows.keys()
    for name, row in rows.items():
        assert len(row["seconds"]) == 2
        assert row["micro_batches"] == 4
        if name != ONE_DEVICE:
            assert row["difference"] < 1e-5
    assert "mlp in 2 stages" in capsys.readouterr().out


def test_ratios_say_how_many_times_as_long_the_others_take():
    seconds = {OURS: [2.0, 4.0, 2.0], TORCH: [3.0, 4.0, 4.0]}
    result = PipelineResult("vgg16", 2, (17,), 64, seconds, {OURS: 0.0, TORCH: 1e-7})
    assert result.against(TORCH, OURS) == [1.5, 1.0, 2.0]
    row = result.record()[1]
    assert row["ratio_to"][OURS]["median"] == 1.5
    assert row["split_points"] == [17]
    assert "1.5 (1.25 to 1.75)" in str(result)


def test_a_pipeline_of_one_stage_is_refused():
    with pytest.raises(ValueError, match="2 stages or more, got world size 1"):
        next(bench_pipeline(world_sizes=(1,)))


def test_activations_are_timed_both_ways():
    found = placement.measure_transport(2, sizes=(2**10, 2**20))
    assert {size: list(ways) for size, ways in found.seconds.items()} == {
        2**10: ["shared memory", "gloo"],
        2**20: ["shared memory", "gloo"],
    }
    assert [row["num_bytes"] for row in found.record()["transport"]] == [2**10, 2**20]
    made_up = placement.Transport({4: {"shared memory": [1.0, 2.0], "gloo": [6.0, 8.0]}})
    assert made_up.times_gloo(4) == [6.0, 4.0]
    assert "5 (4.5 to 5.5)" in str(made_up)


def layers_of_a_second(count=34):
    return Profile("vgg16", 16, 100, (LayerCost("Linear", 1.0, 2.0, 10**6, 400, 50),) * count)


def fake_split(model, points, *, frozen=0, batch_size=8, micro_batches=1, steps=2, **_):
    stages, cuts = len(points) + 1, len(points)
    crossing = [[0.5] * steps if frozen < point else [] for point in points]
    return MeasuredSplit(
        split_points=points,
        batch_size=batch_size,
        micro_batches=micro_batches,
        schedule="gpipe",
        forward_s=[1.0] * stages,
        backward_s=[1.0] * stages,
        forward_hop_s=[[0.5] * steps] * cuts,
        backward_hop_s=crossing,
        hop_bytes=[1000] * cuts,
        # The best cut is the one before layer 20.
        step_s=[100.0 + abs(points[0] - 20)] * steps,
        memory_bytes=[1] * stages,
        held_bytes=[1] * stages,
        trace=Trace(),
    )


def test_the_placement_bench_records_hops_cuts_and_figures(tmp_path, monkeypatch, capsys):
    seconds = {4: {"shared memory": [1.0], "gloo": [6.0]}}
    fakes = {
        "measure_transport": lambda repeats: placement.Transport(seconds),
        "stage_link": lambda **_: Link(0.0, 1e-9),
        "measure_profile": lambda *_, **__: layers_of_a_second(),
        "measure_split": fake_split,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(placement, name, fake)
    path, figure = tmp_path / "placement.json", tmp_path / "placement.png"
    words = ["--repeats", "2", "--json", str(path), "--figure", str(figure)]
    assert main(["bench", "placement", *words]) == 0
    record = json.loads(path.read_text())
    assert record["transport"][0]["gloo_to_shared"]["median"] == 6
    # The reference's four devices with a frozen backbone: one gradient goes back, to the average.
    rows = [row for row in record["hops"] if row["placement"] == "4 devices"]
    head = [(row["cut"], row["direction"]) for row in rows if row["trained"] == "head"]
    assert head.count((33, "gradient")) == head.count((33, "activation")) == 2
    assert (15, "gradient") not in head
    # All layers are alike: the planner cuts in the middle, and the best was said to be 20.
    cuts = record["cuts_1_micro_batches"]
    assert len(cuts["points"]) == 33
    assert record["cuts_4_micro_batches"]["regret"] == pytest.approx(103 / 100)
    assert {p.name for p in tmp_path.glob("*.png")} == {
        "placement_hops.png",
        "placement_cuts_1_micro_batches.png",
        "placement_cuts_4_micro_batches.png",
    }
    assert "the planner's cut / the best one, measured: 1.030" in capsys.readouterr().out
