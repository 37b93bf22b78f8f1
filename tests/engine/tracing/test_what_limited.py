"""What limited a run, on recorded runs.

tests/engine/tracing/recorded/NAME.json.gz is ``result.trace.save`` of a real run on two cores,
with times rounded to 0.1 µs: ``computing`` is ddp on 2 ranks with batches of 512, ``straggler``
ddp on 3 with straggler 1:4, ``slow_link`` ddp on 2 over a link of 1 ms and 10 MB/s,
``busy_server`` a parameter server and 3 workers over 5 MB/s, ``async_straggler`` the asynchronous
one with straggler 1:6, ``bubble`` model parallelism on 2 stages of equal cost,
``late_without_spans`` four ranks at a barrier of which rank 2 sleeps longer.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from labkit.engine.tracing.chrome import read_traces
from labkit.engine.tracing.limits import what_limited
from labkit.engine.tracing.spans import Span, Trace

RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize(
    ("name", "kind", "rank", "words"),
    [
        ("one_device", "computing", None, "Computing limited the run: it took 97% of the time"),
        ("computing", "computing", None, "of the ranks' time. The rest: messages"),
        ("straggler", "straggler", 1, "times as long as the others for its part"),
        ("slow_link", "communication", None, "11% of all communication was hidden"),
        ("busy_server", "bottleneck", 0, "while it exchanged messages with others"),
        ("async_straggler", "computing", None, "and they hardly waited for it"),
        ("bubble", "bubble", None, "the stages were idle for"),
        ("late_without_spans", "straggler", 2, "as long as the others between its messages"),
    ],
)
def test_recorded_runs(name, kind, rank, words):
    limit = what_limited(read_traces([RECORDED / f"{name}.json.gz"])[0])
    assert (limit.kind, limit.rank) == (kind, rank)
    assert words in str(limit)
    assert sum(limit.shares.values()) == pytest.approx(1)


def test_a_stage_is_idle_until_the_last_one_ends():
    last = [Span(1, "wait", 0, 1), Span(1, "forward", 1, 2), Span(1, "backward", 2, 4)]
    first = [Span(0, "forward", 0, 1), Span(0, "communicate", 1, 1)]
    assert what_limited(Trace.merge([first, last])).shares["wait"] == 0.5


def test_only_a_slow_rank_is_named_for_the_waiting():
    server = [Span(0, "wait", 0, 1, peer=2), Span(0, "update", 1, 2)]
    workers = [[Span(rank, "compute", 0, 2)] for rank in (1, 2)]
    assert "The rest: waiting 17%" in str(what_limited(Trace.merge([server, *workers])))
    slow = [Span(2, "compute", 0, 2), Span(2, "communicate", 2, 5)]
    spans = Span(0, "compute", 0, 1), Span(0, "wait", 1, 2, peer=2), Span(0, "communicate", 2, 5)
    others = [[replace(span, rank=rank) for span in spans] for rank in (0, 1)]
    assert "waiting (mostly for rank 2) 13%" in str(what_limited(Trace.merge([slow, *others])))
