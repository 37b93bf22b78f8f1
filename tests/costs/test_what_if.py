"""Predictions of ``labkit.what_if``, against formulas, on traces that are made up.

A made-up trace has the work of each rank back to back, and messages without duration: who waits
for whom is for the replay to find.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from labkit import EmulatedLink, run, train_with, what_if
from labkit.__main__ import main
from labkit.collectives import ring_all_reduce as all_reduce
from labkit.costs.link import Link, all_reduce_seconds
from labkit.costs.traffic import ring_all_reduce_cost
from labkit.engine.comm.work import work_queue_of
from labkit.engine.tracing import Span, Trace
from labkit.engine.tracing.chrome import read_traces
from labkit.schedules.pipeline import PIPELINES, Action, pipeline_streams
from labkit.schedules.ring import ring_all_reduce
from labkit.schedules.timetable import instructions, predicted_slots

RECORDED = Path(__file__).parents[1] / "engine" / "tracing" / "recorded"
LINK = EmulatedLink(0.25, 1000.0)


class Lane:
    """The spans of a rank, back to back."""

    def __init__(self, rank, counts):
        self.rank = rank
        self.counts = counts
        self.now_s = 0.0
        self.spans = []

    def work(self, kind, seconds):
        self.spans.append(Span(self.rank, kind, self.now_s, self.now_s + seconds))
        self.now_s += seconds

    def message(self, dst=None, src=None, num_bytes=0, kind="communicate"):
        ends = []
        if dst is not None:
            self.counts["sent", self.rank, dst] += 1
            ends.append((self.rank, dst, self.counts["sent", self.rank, dst]))
        if src is not None:
            self.counts["received", src, self.rank] += 1
            ends.append((src, self.rank, self.counts["received", src, self.rank]))
        size = num_bytes if dst is not None else 0
        span = Span(self.rank, kind, self.now_s, self.now_s, size, dst)
        self.spans.append(replace(span, messages=tuple(ends)))


def trace_of(num_ranks, fill, **about):
    counts = defaultdict(int)
    lanes = [Lane(rank, counts) for rank in range(num_ranks)]
    for lane in lanes:
        fill(lane)
    return Trace.merge([lane.spans for lane in lanes], about=about)


def pipeline(schedule, num_ranks, micro_batches, forward_s, backward_s):
    def fill(lane):
        for step in instructions(PIPELINES[schedule], lane.rank, num_ranks, micro_batches):
            if isinstance(step, Action):
                seconds = forward_s if step.kind == "forward" else backward_s
                lane.work(step.kind, seconds[lane.rank])
            else:
                ends = {"dst": step.send and step.send.peer, "src": step.recv and step.recv.peer}
                lane.message(**ends, num_bytes=1)

    return trace_of(num_ranks, fill)


def ring_steps(num_ranks, num_bytes, steps=3, addition_s=0.0):
    """Training steps of 1 s on each rank, each with a ring all-reduce."""

    def fill(lane):
        for _ in range(steps):
            lane.work("data", 0.0)
            lane.work("compute", 1.0)
            for hop in ring_all_reduce(lane.rank, num_ranks):
                lane.message(hop.dst, hop.src, num_bytes // num_ranks, kind=hop.phase)
                if hop.phase == "share_reduce":
                    lane.work(hop.phase, addition_s)

    return trace_of(num_ranks, fill, strategy="ring_all_reduce", batch_size=12)


def end_s(trace):
    return max(span.end_s for span in trace.spans)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("slow", [0, 1, 2])
def test_a_slow_stage_gives_the_timetable_of_that_stage(schedule, slow):
    forward_s = [1.0, 1.0, 1.0]
    backward_s = [2.0, 2.0, 2.0]
    trace = pipeline(schedule, 3, 4, forward_s, backward_s)
    streams = pipeline_streams(schedule, 3, 4)
    slots = predicted_slots(streams, forward_s, backward_s)
    assert end_s(what_if(trace).predicted) == max(slot.end_s for slot in slots)
    slow_trace = what_if(trace, stragglers={slow: 3.0}).predicted
    forward_s[slow] *= 3
    backward_s[slow] *= 3
    slots = predicted_slots(streams, forward_s, backward_s)
    assert end_s(slow_trace) == max(slot.end_s for slot in slots)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_ring_costs_what_its_formula_says(num_ranks):
    num_bytes = 1200
    link = Link(0.25, 1e-3)
    prediction = what_if(ring_steps(num_ranks, num_bytes), link=LINK)
    ring_s = all_reduce_seconds("ring", num_bytes, num_ranks, link)
    assert prediction.predicted_s == pytest.approx(1.0 + ring_s)
    assert prediction.recorded_s == 1.0
    assert prediction.unit == "a step"
    kinds = prediction.predicted.seconds_by_kind(rank=0)
    assert kinds["share_reduce"] + kinds["share_only"] == pytest.approx(3 * ring_s)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_on_more_ranks_the_batch_is_divided_and_the_ring_grows(ranks):
    num_bytes = 1200
    prediction = what_if(ring_steps(2, num_bytes), ranks=ranks, link=LINK)
    ring_s = all_reduce_seconds("ring", num_bytes, ranks, Link(0.25, 1e-3))
    assert prediction.predicted_s == pytest.approx(2 / ranks + ring_s)
    cost = ring_all_reduce_cost(num_bytes // 4, 4, ranks)
    for rank in range(ranks):
        sent = [span.num_bytes for span in prediction.predicted.of(rank)]
        assert sum(sent) == 3 * cost.num_bytes


@pytest.mark.parametrize("recorded", [2, 3])
def test_a_rank_adds_all_slices_but_its_own(recorded):
    prediction = what_if(ring_steps(recorded, 1200, addition_s=0.6), ranks=6)
    tensor_s = 0.6 * recorded
    assert prediction.predicted_s == pytest.approx(recorded / 6 + tensor_s * 5 / 6)


@pytest.mark.parametrize("options", [{"strategy": "ddp", "bucket_mb": 0.01}, {"stage": 2}])
def test_bytes_on_more_ranks_are_those_of_a_run(options):
    data = torch.randn(60, 1, 8, 8).double(), torch.randint(10, (60,))
    settings = {"model": "mlp", "dataset": data, "batch_size": 20, "dtype": "float64"}
    settings = {"strategy": "sharded"} | settings | options | {"device": "cpu"}
    two, four = (train_with(world_size=ranks, **settings) for ranks in (2, 4))
    predicted = what_if(two, ranks=4).predicted
    for rank, sent in enumerate(four.bytes_sent):
        # The ranks also tell each other the losses of the epoch.
        assert sum(span.num_bytes for span in predicted.of(rank)) == pytest.approx(sent, rel=1e-3)


def test_an_update_of_a_part_of_the_parameters_takes_less_on_more_ranks():
    ring = ring_steps(2, 1200)
    spans = [
        replace(span, kind="update") if span.kind == "compute" else span for span in ring.spans
    ]
    about = ring.about | {"strategy": "sharded"}
    prediction = what_if(replace(ring, spans=tuple(spans), about=about), ranks=4)
    assert prediction.predicted_s == pytest.approx(prediction.recorded_s / 2)


def test_a_step_of_local_sgd_is_a_part_of_its_round(tmp_path):
    settings = {"model": "mlp", "batch_size": 8, "train_size": 96, "device": "cpu"}
    result = train_with("ddp", world_size=2, average_every=4, **settings)
    trace, _ = read_traces([result.trace.save(tmp_path / "trace.json")])
    step_s = what_if(trace, link=EmulatedLink(10.0)).predicted_s
    # An average is an all-reduce of two messages of 10 s.
    assert step_s == pytest.approx(20 / 4, rel=0.2)


def test_a_step_is_not_compared_with_a_whole_run():
    prediction = what_if(ring_steps(2, 1200), ranks=4)
    with pytest.raises(ValueError, match="a step, and the run has 1 s in all"):
        prediction.beside(trace_of(2, lambda lane: lane.work("compute", 1.0)))


@pytest.mark.parametrize(("count", "num_bytes"), [(2, 2400), (4, 1600)])
def test_an_all_reduce_in_shared_memory_becomes_a_ring(count, num_bytes):
    """Of 1200 bytes on 3 ranks: in one hop, or as a ring's messages."""

    def fill(lane):
        span = Span(lane.rank, "all_reduce", 0.0, 0.0, num_bytes)
        lane.spans.append(replace(span, messages=((-1, -1, 1),) * count))

    ring_s = all_reduce_seconds("ring", 1200, 3, Link(0.25, 1e-3))
    assert end_s(what_if(trace_of(3, fill), link=LINK).predicted) == pytest.approx(ring_s)


def test_ranks_of_one_host_share_its_card():
    def fill(lane):
        pair = (lane.rank + 2) % 4
        ends = {"dst": pair} if lane.rank < 2 else {"src": pair}
        lane.message(**ends, num_bytes=500)

    trace = trace_of(4, fill)
    assert end_s(what_if(trace, link=LINK).predicted) == pytest.approx(0.25 + 0.5)
    shared = what_if(trace, link=EmulatedLink(0.25, 1000.0, ranks_per_host=2))
    assert end_s(shared.predicted) == pytest.approx(0.25 + 2 * 0.5)
    one_host = what_if(trace, link=EmulatedLink(0.25, 1000.0, ranks_per_host=4))
    assert end_s(one_host.predicted) == 0.0


def overlapping():
    """Backward with an operation of another thread, recorded over LINK; rank 1 takes longer."""
    spans = []
    for rank, compute_s in ((0, 1.0), (1, 2.0)):
        both = ((rank, 1 - rank, 1), (1 - rank, rank, 1))
        call = (1, compute_s / 2)
        spans.append(Span(rank, "compute", 0.0, compute_s))
        if rank == 0:
            spans.append(replace(Span(0, "wait", 0.5, 1.0, 0, 1, 1), call=call))
        sent = Span(rank, "share_reduce", 1.0, 2.5, 1000, 1 - rank, 1)
        spans.append(replace(sent, messages=both, call=call))
        waited = Span(rank, "wait", compute_s, 2.5)
        spans.append(replace(waited, messages=((rank, rank, 1),)))
        spans.append(Span(rank, "update", 2.5, 2.75))
    about = {"link": {"latency_s": 0.25, "bandwidth_bytes_per_s": 1e3, "ranks_per_host": None}}
    return Trace.merge([spans], about=about)


def test_a_trace_under_its_own_conditions_is_itself():
    trace = overlapping()
    expected = {(s.rank, s.lane, s.kind, s.start_s, s.end_s) for s in trace.spans}
    replayed = what_if(trace).predicted.spans
    assert {(s.rank, s.lane, s.kind, s.start_s, s.end_s) for s in replayed} == expected


def test_an_operation_of_a_thread_follows_its_call_and_hides_behind_computing():
    trace = overlapping()
    # 0.25 of the recorded 1.5 s were neither the link's nor waiting: they stay.
    free = what_if(trace, link=EmulatedLink(0.0)).predicted
    assert [span.end_s for span in free.of(0, "share_reduce")] == [1.25]
    assert [span.end_s for span in free.of(1, "wait")] == []
    slow = what_if(trace, stragglers={0: 6.0}).predicted
    # Rank 0 calls after 3 s, and goes on computing until 6 s.
    assert [(s.start_s, s.end_s) for s in slow.of(1, "share_reduce")] == [(3.0, 4.5)]
    assert end_s(slow) == 6.25


def test_a_run_records_what_a_prediction_needs(tmp_path):
    def in_two_threads(comm):
        tensors = [torch.ones(12) for _ in range(3)]
        comm.barrier()
        queue = work_queue_of(comm)
        works = []
        for tensor in tensors:
            with comm.span("compute"):
                tensor.mul_(2.0)
            works.append(
                queue.add("all_reduce", lambda comm, t=tensor: all_reduce(comm, t), [tensor], [])
            )
        # In a region of its kind, and without one.
        works[0].wait()
        with comm.span("wait"):
            for work in works:
                work.wait()

    result = run(in_two_threads, world_size=3, device="cpu", link=EmulatedLink(1e-3, 1e7))
    ends = defaultdict(set)
    for span in result.trace.spans:
        for message in span.messages:
            ends[message].add(span.rank)
    for (src, dst, _), ranks in ends.items():
        assert ranks == ({0, 1, 2} if src < 0 else {src, dst})
    for rank in range(3):
        spans = result.trace.of(rank)
        waited = {m[2] for span in spans for m in span.messages if m[:2] == (rank, rank)}
        assert waited == {span.call[0] for span in spans if span.call}
    assert result.trace.about["link"]["bandwidth_bytes_per_s"] == 1e7
    path = result.trace.save(tmp_path / "trace.json")
    change = {"link": EmulatedLink(0.1), "stragglers": {1: 4.0}}
    prediction = what_if(read_traces([path])[0], **change)
    assert prediction.predicted_s == pytest.approx(what_if(result, **change).predicted_s)
    # Three rings of four messages, one after the other.
    assert prediction.predicted_s > 12 * 0.1
    for lane in {(span.rank, span.lane) for span in prediction.predicted.spans}:
        spans = prediction.predicted.of(lane[0], lane=lane[1])
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(spans))


def test_the_command_writes_a_trace_that_says_it_is_a_prediction(tmp_path, capsys):
    path = str(ring_steps(2, 1200).save(tmp_path / "trace.json"))
    out = str(tmp_path / "out.json")
    assert (
        main(["explain", path, "--link", "250ms,1kB/s", "--straggler", "1:2", "--out", out]) == 0
    )
    printed = capsys.readouterr().out
    assert "Recorded: 1 s a step." in printed
    assert "3.7 times as long" in printed
    assert "rank 1 (predicted)" in Path(out).read_text()
    assert main(["explain", out]) == 0
    assert "This is a prediction" in capsys.readouterr().out
    for words, reason in (
        ([out, "--ranks", "4"], "give the recorded one"),
        ([path, "--out", path], "is the recorded trace"),
        ([path, out, "--ranks", "4"], "give it alone"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["explain", *words])
        assert reason in capsys.readouterr().err


def bad(name):
    ring = ring_steps(2, 1200)
    if name == "its file":
        return "trace.json"
    if name == "profiler":
        return read_traces([RECORDED / f"profiler_rank{rank}.json.gz" for rank in (0, 1)])[0]
    if name == "old":
        return read_traces([RECORDED / "straggler.json.gz"])[0]
    if name == "one rank":
        return replace(ring, spans=tuple(ring.of(0)))
    if name == "two of three":
        spans = [span for span in ring_steps(3, 1200).spans if span.rank != 2]
        return replace(ring, spans=tuple(spans))
    if name == "thread":
        return replace(ring, spans=(*ring.spans, Span(0, "compute", 0.0, 1.0, lane=1)))
    if name == "few samples":
        return ring
    if name == "one step":
        # Of a step the loading of data is the first span.
        later = [span for span in ring.spans if span.kind != "data" or span.start_s == 0.0]
        return replace(ring, spans=tuple(later))
    if name == "barriers":
        return replace(ring, spans=tuple(replace(span, num_bytes=0) for span in ring.spans))
    if name == "sync_batch_norm":
        return replace(ring, about=ring.about | {name: True})
    return replace(ring, about={"strategy": name, "batch_size": 12, "compress": "topk"})


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("profiler", {}, "PyTorch's profiler"),
        ("old", {}, "record the run again"),
        ("one rank", {}, "of one rank"),
        ("two of three", {}, "no spans of rank 2"),
        ("thread", {}, "in a thread"),
        ("async_parameter_server", {}, "depends on the seconds"),
        ("data_parallel", {}, "no messages"),
        ("pipeline", {"ranks": 3}, "a trace of pipeline"),
        ("ddp", {"ranks": 3}, "no parts of a ring"),
        ("ddp", {"stragglers": {2: 2.0}}, "the rank of a straggler"),
        ("few samples", {"ranks": 13}, "without samples"),
        ("one step", {"ranks": 3}, "record two or more"),
        ("barriers", {}, "those of process groups"),
        ("sync_batch_norm", {"ranks": 3}, "no ring's"),
        ("ddp", {"stragglers": {1: 0.0}}, "above 0"),
        ("ddp", {"link": "10ms,1GB/s"}, "must be a labkit.EmulatedLink"),
        ("its file", {}, "must be a run's result or its trace, got a str"),
    ],
)
def test_what_cannot_be_predicted_is_refused_with_a_reason(name, change, words):
    with pytest.raises(ValueError, match=words):
        what_if(bad(name), **change)
