"""Sentences from measurements, on recorded runs in which the effect is there and on others.

``compare`` reads data/results/compare.json, recorded on two cores with nothing else running.
tests/notebook/recorded/NAME.json.gz holds ``result.as_dict()`` and the spans of a real run on a
busy machine: 4 epochs of 1,024 digits in batches of 256, with one device (``single``), DDP on two
ranks over a link of 10 ms and 5 MB/s, DDP with straggler 1:6, DDP in buckets of 0.01 MiB over 1 ms
and 20 MB/s, and an asynchronous parameter server with straggler 1:4.
"""

import dataclasses
import functools
import gzip
import json
from dataclasses import fields
from pathlib import Path

import pytest

import workbook
from labkit import RunConfig, TrainResult
from labkit.comm.peak_memory import PeakMemory
from labkit.runtime.launch import RunResult
from labkit.tracing import Span, Trace
from labkit.tracing.chrome import read_traces
from workbook import verdict
from workbook.notebook.verdict import Ratio

HERE = Path(__file__).parent
LIMITS = HERE.parent / "tracing" / "recorded"
RESULTS = HERE.parents[1] / "data" / "results"
SIX_EPOCHS, FOUR_RANKS, SMALL_BATCHES = 0, 3, 6


@functools.cache
def results(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def compare(name, setting, repeat=0, strategy="ddp"):
    """A run of the recorded comparison as a ``TrainResult``, without its parameters and trace."""
    record = results("compare")
    runs = (r for r in record["runs"] if (r["contender"], r["setting"]) == (name, setting))
    run = list(runs)[repeat]
    settings = record["settings"][setting] | ({"world_size": 1} if name == "single" else {})
    config = RunConfig(strategy=strategy, **settings)
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
    trace = read_traces([LIMITS / f"{name}.json.gz"]).trace
    return RunResult([], trace, 1.0, [], [])


# speedup


def test_two_ranks_and_what_their_time_is_made_of():
    found = verdict.speedup(compare("single", SIX_EPOCHS), compare("ddp", SIX_EPOCHS))
    assert found.holds
    assert str(found).startswith(
        "Two ranks were 1.89 times as fast as one device (1.42 to 2.25 in 5 repeats of each): on "
        "average, a rank computed 47% as long as one device, and of its time communication took "
    )
    slow = verdict.speedup(recorded("single"), recorded("ddp_slow_link"))
    assert (slow.holds, slow.ratio.high < 1) == (False, True)
    assert f"Two ranks took {1 / slow.ratio.median:.3g} times as long as one device" in str(slow)
    assert "of its time communication took 60% and waiting" in str(slow)


def test_a_speedup_that_is_within_the_spread():
    one, many = compare("single", SIX_EPOCHS), compare("TorchDataParallel", SIX_EPOCHS)
    found = verdict.speedup(one, many)
    assert found.holds is None
    assert str(found).endswith(": this measurement cannot tell them apart.")


def test_replicas_in_one_process_are_no_ranks():
    one = compare("single", SIX_EPOCHS)
    epochs = [{**epoch, "seconds": 3 * epoch["seconds"]} for epoch in one.epochs]
    config = RunConfig(strategy="data_parallel", world_size=2)
    phases_s = {"compute": one.phases_s["compute"] / 2, "gather": one.phases_s["compute"] / 2}
    many = dataclasses.replace(one, config=config, epochs=epochs, phases_s=phases_s)
    said = str(verdict.speedup(one, many))
    assert said.startswith("Two replicas took 3 times as long as one device")
    assert "the main thread computed 48% as long" in said
    assert "communication took 50%" in said


def test_seconds_alone_give_no_reason():
    found = verdict.speedup([2.0, 2.2, 1.9], [1.0, 1.1, 1.0], ranks=2)
    assert str(found) == "Two ranks were 2 times as fast as one device (1.9 to 2 in 3 pairs)."
    assert verdict.speedup(2.0, 1.0, ranks=9).holds is None
    with pytest.raises(ValueError, match="ranks is None: give the number of ranks, 2 or more"):
        verdict.speedup([1.0], [1.0])


# faster, race


def of_pipeline(contender):
    return next(r["seconds"] for r in results("pipeline")["rows"] if r["contender"] == contender)


def test_a_pipeline_is_faster_than_the_same_split_without():
    names = ("labkit gpipe", "labkit split, not pipelined")
    found = verdict.faster({name: of_pipeline(name) for name in names})
    assert found.holds
    assert str(found) == (
        "Fastest: labkit gpipe, 1.31 times as fast as labkit split, not pipelined (1.23 to 1.44 "
        "in 5 pairs)."
    )


def test_two_schedules_that_cannot_be_told_apart():
    names = ("labkit gpipe", "labkit 1f1b", "labkit split, not pipelined")
    found = verdict.faster({name: of_pipeline(name) for name in names})
    assert found.holds is None
    assert str(found).startswith("Cannot be told apart: labkit gpipe and labkit 1f1b (0.918 to")
    assert "labkit gpipe was 1.31 times as fast as labkit split" in str(found)


def test_many_repeats_are_compared_by_their_quartiles():
    rows = {row["backend"]: row["seconds"] for row in results("ddp")["rows"][:3]}
    assert len(rows["gloo"]) == 30
    found = verdict.faster(rows)
    assert found.holds is None
    assert "in 30 pairs" in str(found)


def test_one_measurement_of_each_says_so():
    found = verdict.faster({"ring": 1.0, "naive": 2.0})
    assert found.holds is None
    assert "measured once" in str(found)
    with pytest.raises(ValueError, match="give two names or more"):
        verdict.faster({"ring": [1.0]})


def test_the_slow_runs_limit_is_the_reason():
    found = verdict.faster({"one": [1.0, 1.1], "two": [3.0, 3.1]}, run=limited("slow_link"))
    assert "Communication limited the run" in str(found)


def test_a_race_to_an_accuracy():
    runs = {name: compare(name, SIX_EPOCHS) for name in ("single", "ddp")}
    assert str(verdict.race(runs, 0.97)) == (
        "First at 97%: ddp after 867 ms and 6 epochs, single after 1.67 s and 6 epochs."
    )
    assert str(verdict.race(runs, 0.999)) == "No run reached 100%: train longer."
    short = {**runs, "three epochs": compare("single", 5)}
    assert str(verdict.race(short, 0.97)).endswith("; never: three epochs.")


# against_model, bubble


def test_a_measurement_and_its_model():
    """The seconds of page 06's rings on the emulated link, and of the pipeline bench."""
    agree = verdict.against_model([0.4894, 0.4954, 0.5388], 0.48, what="the naive all-reduce")
    assert agree.holds
    assert str(agree) == (
        "The naive all-reduce was 495 ms (489 ms to 539 ms in 3 repeats), and the model says 480 "
        "ms: they agree."
    )
    unsure = verdict.against_model([0.000114, 0.00404, 0.074], 0.000271)
    assert unsure.holds is None
    assert str(unsure).endswith("the repeats differ too much to compare the two.")
    seconds = of_pipeline("labkit gpipe")
    differ = verdict.against_model(seconds, 1.2, run=limited("bubble"))
    assert differ.holds is False
    assert "measured is 1.46 times the model. The bubble limited the run" in str(differ)


def test_a_bubble_that_is_larger_than_the_formulas():
    found = verdict.bubble([0.258, 0.262, 0.267], 0.2, run=limited("bubble"))
    assert found.holds is False
    assert str(found).startswith(
        "The stages' idle time was 26.2 % (25.8 % to 26.7 % in 3 repeats), and the model says 20 "
        "%: measured is 1.31 times the model. The bubble limited the run"
    )
    assert verdict.bubble(0.21, 0.2).holds


# overlap, communication


def test_overlap_is_found_where_a_thread_sends():
    found = verdict.overlap(recorded("bucketed_slow_link"))
    assert found.holds
    assert str(found) == "24% of the communication was hidden behind computing."


def test_no_overlap_has_its_reason():
    found = verdict.overlap(recorded("ddp_slow_link"))
    assert found.holds is False
    assert str(found) == (
        "No communication was hidden behind computing: every thread that sends also computes, and "
        "does one after the other."
    )
    assert verdict.overlap(limited("one_device")).holds is None


def test_the_share_of_communication():
    found = verdict.communication(recorded("ddp_slow_link"))
    assert found.holds
    assert str(found).endswith("rank 0 sent most, 1.77 MiB in 32 messages.")
    assert not verdict.communication(limited("computing")).holds


# staleness, traffic, fair


def test_staleness_and_whose_gradients_were_late():
    found = verdict.staleness(recorded("async"))
    assert found.holds
    assert str(found) == (
        "A gradient missed 1.88 updates on average, of 48 (at most 8); with 3 workers the rule "
        "says 2. Rank 1's were the latest, 6.17 on average."
    )
    with pytest.raises(ValueError, match="ddp counts no staleness"):
        verdict.staleness(recorded("ddp_slow_link"))


def test_the_run_whose_largest_rank_or_gpu_took_least_memory_is_first():
    def ran(*peaks):
        nothing = [0] * len(peaks)
        return RunResult(nothing, Trace(), 1.0, nothing, nothing, peak_memory=list(peaks))

    runs = {"whole": ran(PeakMemory(3 * 2**20), None), "pieces": ran(None, PeakMemory(2**20))}
    assert str(verdict.peak_memory(runs)) == (
        "Least peak memory: pieces, 1 MiB on rank 1; whole took 3 times as much, 3 MiB (rank 0)."
    )
    close = {"one": ran(PeakMemory(2**30, {"cuda:0": 105})), "other": ran(PeakMemory(100))}
    assert verdict.peak_memory(close).holds is None
    unknown = verdict.peak_memory({"one": ran(PeakMemory(None)), "other": ran(PeakMemory(5))})
    assert "of one is not known" in str(unknown)


# The numbers and the display


def test_pairs_leave_out_what_changed_between_them():
    ratio = Ratio.of([2.0, 20.0, 200.0], [1.0, 10.0, 100.0], paired=True)
    assert (ratio.low, ratio.median, ratio.high) == (2, 2, 2)
    assert Ratio.of([2.0, 20.0], [1.0, 10.0], paired=False).is_larger is None


def test_one_outlier_of_eight_does_not_decide():
    ratio = Ratio.of([2.0] * 7 + [0.1], [1.0] * 8, paired=True)
    assert ratio.is_larger


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_what_is_no_time_is_refused(value):
    with pytest.raises(ValueError, match="repeats must be numbers above 0"):
        verdict.faster({"a": [value], "b": [1.0]})


def test_a_verdict_shows_as_its_sentence():
    found = verdict.faster({"a<b": [1.0, 1.0], "c": [3.0, 3.0]})
    assert repr(found) == str(found)
    assert found._repr_html_().startswith("<p>Fastest: a&lt;b, 3 times as fast as c")
    assert workbook.verdict is verdict
