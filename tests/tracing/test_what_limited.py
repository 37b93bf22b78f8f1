"""What limited a run: on traces made by hand, where the answer is known, and on recorded runs.

tests/tracing/recorded/NAME.json.gz is ``result.trace.save`` of a real run on two cores, with times
rounded to 0.1 µs: ``computing`` is ddp on 2 ranks with batches of 512, ``straggler`` ddp on 3 with
straggler 1:4, ``slow_link`` ddp on 2 over a link of 1 ms and 10 MB/s, ``busy_server`` a parameter
server and 3 workers over 5 MB/s, ``async_straggler`` the asynchronous one with straggler 1:6,
``bubble`` model parallelism on 2 stages of equal cost, ``late_without_spans`` four ranks at a
barrier of which rank 2 sleeps longer. ``profiler_rankN`` is PyTorch's profiler: DDP over gloo on 2
ranks, whose rank 1 sleeps 20 ms in every step.
"""

from pathlib import Path

import pytest
from ranks import travel_by_value

from labkit import run, train_with
from labkit.tracing import Span, Trace
from labkit.tracing.chrome import read_traces
from labkit.tracing.limits import rank_times, what_limited
from labkit.training.measured import measure_split

travel_by_value(__name__)

RECORDED = Path(__file__).parent / "recorded"


def trace_of(*spans):
    """A trace of (rank, kind, start, end[, peer[, lane]])."""
    made = [
        Span(rank, kind, start, end, 0, *rest[:1], *([rest[1]] if rest[1:] else []))
        for rank, kind, start, end, *rest in spans
    ]
    return Trace.merge([made])


# The seconds of each state


def test_states_add_up_and_computing_hides_communication():
    times = rank_times(
        trace_of(
            (0, "compute", 0, 4),
            (0, "all_reduce", 3, 6, 1, 1),
            (0, "wait", 4, 7),
            (0, "update", 8, 9),
        )
    )[0]
    assert times.seconds == {"compute": 5, "communicate": 2, "wait": 1, "gap": 1}
    assert times.hidden_s == 1
    assert times.elapsed_s == 9


def test_who_waits_for_a_rank_that_waits_is_waiting_for_the_last_one():
    """In a ring a rank names the neighbour it sends to, and the straggler is somewhere else."""
    times = rank_times(
        trace_of(
            (0, "wait", 0, 6, 1),
            (1, "wait", 0, 6, 2),
            (2, "compute", 0, 6),
            (3, "wait", 0, 6, 0),
        )
    )
    assert {rank: dict(one.blamed_s) for rank, one in times.items()} == {
        0: {},
        1: {},
        2: {"compute": 18},
        3: {},
    }


# The kinds of limits, on traces made by hand


def test_a_straggler_is_named_with_its_factor():
    limit = what_limited(
        trace_of(
            *((rank, "compute", 0, 2) for rank in (0, 2)),
            *((rank, "wait", 2, 8) for rank in (0, 2)),
            (1, "compute", 0, 8),
        )
    )
    assert (limit.kind, limit.rank, limit.slowdown) == ("straggler", 1, 4)
    assert str(limit) == (
        "Rank 1 limited the run: it took 4 times as long as the others for the same amount of "
        "work, and the others waited for it 75% of their time. The rest: computing 50%."
    )


# Recorded runs


@pytest.mark.parametrize(
    ("name", "kind", "rank", "words"),
    [
        ("one_device", "computing", None, "Computing limited the run: it took 97% of the time"),
        ("computing", "computing", None, "of the ranks' time. The rest: messages"),
        ("straggler", "straggler", 1, "times as long as the others for the same amount of work"),
        ("slow_link", "communication", None, "11% of all communication was hidden"),
        ("busy_server", "bottleneck", 0, "while it exchanged messages with others"),
        ("async_straggler", "computing", None, "and hardly any of them waited for it"),
        ("bubble", "bubble", None, "the stages waited for each other in"),
        ("late_without_spans", "straggler", 2, "as long as the others between its messages"),
    ],
)
def test_recorded_runs(name, kind, rank, words):
    limit = what_limited(read_traces([RECORDED / f"{name}.json.gz"]).trace)
    assert (limit.kind, limit.rank) == (kind, rank)
    assert words in str(limit)
    assert sum(limit.shares.values()) == pytest.approx(1)


def test_the_two_files_of_pytorchs_profiler_show_who_is_late():
    files = [RECORDED / f"profiler_rank{rank}.json.gz" for rank in (0, 1)]
    read = read_traces(files)
    limit = what_limited(read.trace, gap=read.gap)
    assert (limit.kind, limit.rank, read.note) == ("straggler", 1, "")
    assert "rank 0 waited for it 42% of its time" in str(limit)


# Runs of today


def nothing(comm):
    pass


def test_results_explain_themselves():
    assert run(nothing, world_size=1).explain().kind == "nothing"
    trained = train_with("ddp", world_size=2, train_size=128).explain()
    assert trained.kind != "nothing"
    assert sum(trained.shares.values()) == pytest.approx(1)
    split = measure_split("small_cnn", (3,), steps=1, input_shape=(1, 8, 8)).explain()
    assert split.shares["compute"] > 0


def test_what_pytorch_sends_itself_is_said_to_be_missing():
    result = train_with("ddp", world_size=2, train_size=64, builtin=True)
    assert str(result.explain()).endswith("not recorded: they count as computing.")
