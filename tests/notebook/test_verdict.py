"""Sentences from measurements, on recorded runs in which the effect is there and on others.

``compare`` reads data/results/compare.json, recorded on two cores with nothing else running.
tests/notebook/recorded/NAME.json.gz holds ``result.as_dict()`` and the spans of a real run on a
busy machine: 4 epochs of 1,024 digits in batches of 256, with one device (``single``), DDP on two
ranks over a link of 10 ms and 5 MB/s, DDP in buckets of 0.01 MiB over 1 ms and 20 MB/s, and an
asynchronous parameter server with straggler 1:4.
"""

import functools
import gzip
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from labkit import RunConfig, TrainResult
from labkit.engine.runtime.launch import RunResult
from labkit.engine.tracing import Span, Trace
from labkit.engine.tracing.chrome import read_traces
from workbook import verdict

HERE = Path(__file__).parent
LIMITS = HERE.parent / "engine" / "tracing" / "recorded"
RESULTS = HERE.parents[1] / "data" / "results"
SIX_EPOCHS = 0


@functools.cache
def results(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def compare(name, setting):
    """A run of the recorded comparison as a ``TrainResult``, without its parameters and trace."""
    record = results("compare")
    runs = (r for r in record["runs"] if (r["contender"], r["setting"]) == (name, setting))
    run = next(runs)
    settings = record["settings"][setting] | ({"world_size": 1} if name == "single" else {})
    config = RunConfig(strategy="ddp", **settings)
    phases_s, counts = run["phases_s"]["worker"], (run["bytes_sent"], run["messages"])
    machine = record["hardware"], record["versions"]
    return TrainResult(config, run["epochs"], phases_s, *counts, {}, [], Trace(), *machine)


def recorded(name):
    """A run recorded with its trace, without its parameters."""
    with gzip.open(HERE / "recorded" / f"{name}.json.gz") as file:
        found = json.load(file)
    keys = ("epochs", "phases_s", "bytes_sent", "messages")
    trace = Trace(tuple(Span(*span) for span in found["spans"]))
    machine = found["hardware"], found["versions"]
    notes = {"staleness": found.get("staleness", [])}
    known = {field.name for field in fields(RunConfig)}
    config = RunConfig(**{k: v for k, v in found["config"].items() if k in known})
    return TrainResult(config, *(found[k] for k in keys), {}, [], trace, *machine, notes)


def limited(name):
    trace, _ = read_traces([LIMITS / f"{name}.json.gz"])
    return RunResult([], trace, 1.0, [], [])


def test_two_ranks_and_how_long_each_computes():
    one = compare("single", SIX_EPOCHS)
    assert str(verdict.speedup(one, compare("ddp", SIX_EPOCHS))) == (
        "2 ranks were 1.89 times as fast as one device (1.42 to 2.25 in 5 epochs of each, "
        "after the first); in the whole run, the average rank computed 47% as long as one device."
    )
    slow = verdict.speedup(recorded("single"), recorded("ddp_slow_link"))
    assert slow.ratio.high < 1
    assert f"2 ranks took {1 / slow.ratio.median:.3g} times as long as one device" in str(slow)
    unsure = verdict.speedup(one, compare("TorchDataParallel", SIX_EPOCHS))
    assert str(unsure).endswith(": this measurement cannot tell them apart.")


def test_replicas_in_one_process_are_no_ranks():
    one = compare("single", SIX_EPOCHS)
    epochs = [{**epoch, "seconds": 3 * epoch["seconds"]} for epoch in one.epochs]
    config = RunConfig(strategy="data_parallel", world_size=2)
    phases_s = {"compute": one.phases_s["compute"] / 2}
    said = str(verdict.speedup(one, replace(one, config=config, epochs=epochs, phases_s=phases_s)))
    assert said.startswith("2 replicas took 3 times as long as one device")
    assert "the main thread computed 48% as long" in said


# Seconds of five steps of VGG16 in two stages, taken in turns.
PIPELINES = {
    "labkit gpipe": [1.6412, 1.8669, 1.7711, 1.7467, 1.6868],
    "labkit split, not pipelined": [2.0257, 2.3348, 2.4656, 2.2819, 2.4356],
    "labkit 1f1b": [1.7437, 1.7791, 1.6256, 1.9382, 1.8099],
}


def test_the_fastest_and_those_that_cannot_be_told_apart():
    names = ("labkit gpipe", "labkit split, not pipelined")
    assert str(verdict.faster({name: PIPELINES[name] for name in names})) == (
        "Fastest: labkit gpipe, 1.31 times as fast as labkit split, not pipelined (1.23 to 1.44 "
        "in 5 pairs)."
    )
    found = verdict.faster(PIPELINES)
    assert str(found).startswith(
        "Cannot be told apart: labkit gpipe and labkit 1f1b (labkit 1f1b / labkit gpipe: 0.918 to"
    )
    assert "labkit gpipe was 1.31 times as fast as labkit split" in str(found)
    assert "measured once" in str(verdict.faster({"ring": 1.0, "naive": 2.0}))


def test_many_repeats_are_compared_by_their_quartiles():
    with_outlier = {"two seconds": [2.0] * 7 + [0.1], "one second": [1.0] * 8}
    assert verdict.faster(with_outlier).ratio.is_larger
    seconds = {name: 10 * seconds for name, seconds in PIPELINES.items()}
    assert "in the middle half of 50 pairs" in str(verdict.faster(seconds))


def test_pairs_leave_out_what_changed_between_them():
    ratio = verdict.faster({"one": [2.0, 20.0, 200.0], "other": [1.0, 10.0, 100.0]}).ratio
    assert (ratio.low, ratio.median, ratio.high) == (2, 2, 2)
    for one, other in (([2.0, 20.0], [1.0, 10.0, 1.0]), ([2.0], [1.0])):
        assert verdict.faster({"one": one, "other": other}).ratio.is_larger is None


def test_a_race_to_an_accuracy():
    runs = {name: compare(name, SIX_EPOCHS) for name in ("single", "ddp")}
    runs["three epochs"] = compare("single", 5)
    assert str(verdict.race(runs, 0.97)) == (
        "First at 97%: ddp after 867 ms and 6 epochs; single after 1.67 s and 6 epochs; never: "
        "three epochs."
    )
    assert str(verdict.race(runs, 0.999)).startswith("First at 100%: none; never: single, ddp")
    by_loss = str(verdict.race(runs, loss=runs["three epochs"].epochs[-1]["loss"]))
    assert all(f"{name} after" in by_loss for name in runs)
    assert "never: single, ddp" in str(verdict.race(runs, loss=0))


def test_a_measurement_and_its_model():
    """The seconds of page 06's rings on the emulated link, and of the pipeline bench."""
    agree = verdict.against_model([0.4894, 0.4954, 0.5388], 0.48, what="the naive all-reduce")
    assert str(agree) == (
        "The naive all-reduce was 495 ms (489 ms to 539 ms in 3 repeats), and the formula says "
        "480 ms: they agree."
    )
    unsure = verdict.against_model([0.000114, 0.00404, 0.074], 0.000271)
    assert str(unsure).endswith("the repeats differ too much to compare the two.")
    differ = verdict.against_model(PIPELINES["labkit gpipe"], 1.2)
    assert str(differ).endswith("measured is 1.46 times the formula.")


def test_how_much_communication_there_was_and_what_computing_hid():
    found = verdict.overlap(recorded("bucketed_slow_link"))
    assert str(found) == "24% of the communication was hidden behind computing."
    assert str(verdict.overlap(recorded("ddp_slow_link"))).startswith("0% of the communication")
    assert "No message" in str(verdict.overlap(limited("one_device")))


def test_staleness_and_whose_gradients_were_late():
    assert str(verdict.staleness(recorded("async"))) == (
        "A gradient missed 1.88 updates on average, of 48 (at most 8); the rule for long runs "
        "with 3 workers says 2. Rank 1's were the latest, 6.17 on average."
    )
    with pytest.raises(ValueError, match="ddp counts no staleness"):
        verdict.staleness(recorded("ddp_slow_link"))
