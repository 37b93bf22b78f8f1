"""The benches of placements and pipelines: contenders train alike, and times become ratios."""

import json
from types import SimpleNamespace

import pytest
import torch

from labkit.__main__ import main
from labkit.costs.link import Link
from labkit.placement.stage_costs import LayerCost, Profile
from labkit.placement.vgg16_splits import VGG16_SPLITS
from labkit.tracing import Trace
from labkit.training.measured import MeasuredSplit
from workbook.measure import placement, single_cuts
from workbook.measure.pipeline import DUELS, ONE_DEVICE, OURS, PipelineResult
from workbook.measure.single_cuts import Cuts, fastest_others, measure_cuts


@pytest.mark.slow
def test_every_contender_of_the_pipeline_bench_trains_the_same_model(tmp_path, capsys):
    path = tmp_path / "pipeline.json"
    words = ["--models", "mlp", "--repeats", "2", "--json", str(path)]
    assert main(["bench", "pipeline", *words]) == 0
    record = json.loads(path.read_text())
    rows = {row["contender"]: row for row in record["rows"]}
    assert {OURS, ONE_DEVICE, *DUELS["gpipe"], *DUELS["1f1b"]} <= rows.keys()
    for name, row in rows.items():
        assert len(row["seconds"]) == 2
        assert row["micro_batches"] == 4
        if name != ONE_DEVICE:
            assert row["difference"] < 1e-5
    assert [duel["schedule"] for duel in record["duels"]] == ["gpipe", "1f1b"]
    for duel in record["duels"]:
        assert [(name, len(s)) for name, s in duel["seconds"].items()] == [
            (f"labkit {duel['schedule']} on gloo", 2),
            (f"torch {duel['schedule']} on gloo", 2),
        ]
    assert "mlp in 2 stages" in capsys.readouterr().out


def test_ratios_say_how_many_times_as_long_the_others_take():
    seconds = {OURS: [2.0, 4.0, 2.0], "labkit 1f1b": [3.0, 4.0, 4.0]}
    ours, torchs = DUELS["1f1b"]
    duels = {"1f1b": {ours: [2.1, 4.0, 3.9], torchs: [2.0, 4.0, 3.0]}}
    differences = {OURS: 0.0, "labkit 1f1b": 1e-7}
    result = PipelineResult("vgg16", 2, (17,), 64, seconds, differences, duels)
    assert result.against_ours("labkit 1f1b") == [1.5, 1.0, 2.0]
    row = result.record()["rows"][1]
    assert row["ratio_to"][OURS]["median"] == 1.5
    assert row["split_points"] == [17]
    assert "1.5 (1.25 to 1.75)" in str(result)
    # Here it is ours that takes longer: by 5 %, not at all, by 30 %.
    assert result.times_torch("1f1b") == pytest.approx([1.05, 1.0, 1.3])
    assert result.record()["duels"][0]["labkit_to_torch"]["median"] == pytest.approx(1.05)
    assert f"{ours} / {torchs}: 1.050 (1.025 to 1.175), 3 pairs" in str(result)


def test_activations_are_timed_both_ways():
    found = placement.measure_transport(2, sizes=(2**10, 2**20))
    ways = [placement.SHARED, placement.GLOO, placement.COPY]
    assert {size: list(one) for size, one in found.seconds.items()} == {1024: ways, 2**20: ways}
    assert [row["num_bytes"] for row in found.record()["transport"]] == [2**10, 2**20]
    seconds = dict(zip(ways, ([1.0, 2.0], [6.0, 8.0], [0.5, 0.4])))
    made_up = placement.HopTimes({4: seconds})
    assert made_up.against_shared(4, placement.GLOO).median == 5
    assert "5 (4.5 to 5.5)" in str(made_up)
    assert made_up.record()["transport"][0]["copy_to_shared"]["median"] == 0.35


def layers_of_a_second(count=34, model="vgg16", batch_size=16):
    layers = (LayerCost("Linear", 1.0, 2.0, 10**6, 400, 50),) * count
    return Profile(model, batch_size, 100, layers)


def test_all_cuts_take_turns_and_the_best_meet_the_planners_again():
    found = measure_cuts(layers_of_a_second(6, "mlp", 4), Link(0.0, 1e-9), 2, repeats=2)
    assert [(p["split_points"], len(p["measured_s"])) for p in found.points] == [
        ([cut], 2) for cut in (1, 2, 3, 4, 5)
    ]
    # All layers are alike: the planner cuts in the middle.
    planned, *others = found.play_off
    assert planned == 3
    medians = {p["split_points"][0]: sum(p["measured_s"]) / 2 for p in found.points}
    del medians[planned]
    assert others == sorted(medians, key=medians.get)[:3]
    assert {len(seconds) for seconds in found.play_off.values()} == {12}
    assert min(min(seconds) for seconds in found.play_off.values()) > 0


def test_all_ranks_name_the_same_rivals_by_the_last_ranks_times(monkeypatch):
    # Alone, one rank would name 2 and 3 first, the other 6: the last one's times decide.
    one = {1: [0.1] * 3, 2: [1.0] * 3, 3: [1.0] * 3, 4: [2.0] * 3, 5: [2.1, 9, 2.1], 6: [5.0] * 3}
    other = {1: [0.1] * 3, 2: [6.0] * 3, 3: [4.0] * 3, 4: [2.0] * 3, 5: [1.0] * 3, 6: [0.5] * 3}
    reduce_with = {"max": torch.maximum}
    for mine, theirs in ((one, other), (other, one)):
        arriving = torch.tensor(list(theirs.values()), dtype=torch.float64)
        comm = SimpleNamespace(device="cpu", arriving=arriving)
        monkeypatch.setattr(
            single_cuts,
            "tree_all_reduce",
            lambda comm, tensor, op: reduce_with[op](tensor, comm.arriving, out=tensor),
        )
        assert fastest_others(comm, mine, planned=1) == [4, 5, 3]


def made_up_cuts(micro_batches=4):
    points = [
        {"split_points": [cut], "predicted_s": predicted, "measured_s": [measured] * 3}
        for cut, predicted, measured in (
            (1, 4.0, 3.0),
            (2, 2.0, 3.0),
            (3, 3.0, 2.0),
            (4, 3.0, 2.5),
        )
    ]
    # The sweep's winner, 3, was lucky; 4 is the one that is faster than the planner's.
    play_off = {2: [2.2, 4.0, 2.0], 3: [2.0, 4.0, 2.5], 4: [2.0, 3.2, 2.0]}
    return Cuts("vgg16", 16, micro_batches, points, play_off)


def test_the_play_off_decides_pair_by_pair_not_the_luckiest_of_the_sweep():
    found = made_up_cuts()
    assert found.duels()[3].median == 1.0
    assert found.duels()[4].median == pytest.approx(1.1)
    verdict = "the planner's cut 2 takes 1.100 (1.050 to 1.175) times the step of cut 4"
    assert verdict in found.verdict()
    assert found.verdict() in str(found)
    assert "the slowest cut / the fastest 2.000" in str(found)
    record = found.record()["cuts_4_micro_batches"]
    assert [row["cut"] for row in record["play_off"]] == [2, 3, 4]
    assert record["play_off"][2]["planned_to_this"]["median"] == pytest.approx(1.1)
    assert record["verdict"] == found.verdict()


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
        step_s=[100.0] * steps,
        memory_bytes=[1] * stages,
        held_bytes=[1] * stages,
        trace=Trace(),
    )


def test_the_placement_bench_records_hops_cuts_and_figures(tmp_path, monkeypatch, capsys):
    seconds = {4: {placement.SHARED: [1.0], placement.GLOO: [6.0], placement.COPY: [0.5]}}
    fakes = {
        "measure_transport": lambda repeats: placement.HopTimes(seconds),
        "measure_link": lambda **_: Link(0.0, 1e-9),
        "measure_profile": lambda *_, **__: layers_of_a_second(),
        "measure_split": fake_split,
        "measure_cuts": lambda profile, link, micro_batches, repeats: made_up_cuts(micro_batches),
    }
    placements = {name: VGG16_SPLITS[name] for name in ("1 device", "4 devices")}
    monkeypatch.setattr(placement, "VGG16_SPLITS", placements)
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
    assert len(record["cuts_4_micro_batches"]["points"]) == 4
    names = ("hops", "cuts_1_micro_batches", "cuts_4_micro_batches")
    assert {p.name for p in tmp_path.glob("*.png")} == {f"placement_{n}.png" for n in names}
    assert "the planner's cut 2 takes 1.100" in capsys.readouterr().out
