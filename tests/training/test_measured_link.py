"""The measured link: a fit of what the ranks have timed, and a line that says how."""

import pytest

import labkit
from labkit.costs.link import Link
from labkit.runtime.launch import RunResult
from labkit.tracing import Trace
from labkit.training import measured_link
from labkit.training.measured_link import ADDED_BYTES

SIZES = (2**10, 2**20)


def measure(**options):
    return labkit.measure_link(sizes_bytes=SIZES, repeats=3, device="cpu", **options)


def test_a_ping_pong_between_two_ranks():
    link = measure(transport="gloo")
    assert isinstance(link, Link)
    # On a busy machine three small sizes may take the same time: beta is then 0.
    assert link.beta_s_per_byte >= 0 == link.gamma_s_per_byte
    assert {size: len(times) for size, times in link.seconds.items()} == dict.fromkeys(SIZES, 3)
    assert str(link).endswith(
        "(ping-pong between 2 ranks, medians of 3 repeats, 1 KiB to 1 MiB, transport: gloo)"
    )


def test_an_exchange_of_three_ranks_that_add_what_comes():
    link = measure(world_size=3, pattern="exchange", gamma=True)
    assert link.gamma_s_per_byte > 0
    assert len(link.added_s) == 3
    assert "GB/s added (exchange of 3 ranks, medians of 3 repeats" in str(link)


def as_if_timed(monkeypatch, *by_rank):
    """Let the ranks return these seconds: (of the first size, of the second, of additions)."""
    times = [
        measured_link._Times("shared memory", dict(zip(SIZES, by_size)), added_s)
        for *by_size, added_s in by_rank
    ]
    result = RunResult(times, Trace(), 0.0, [0, 0], [0, 0])
    monkeypatch.setattr(measured_link, "run", lambda *_, **__: result)


def test_an_exchange_takes_as_long_as_on_the_slowest_rank(monkeypatch):
    slow = [20e-6] * 3, [1e-3, 1e-3, 9.0], [1e-3] * 3
    quick = [10e-6, 10e-6, 30e-6], [0.5e-3] * 3, [2e-3, 2e-3, 0.1]
    as_if_timed(monkeypatch, quick, slow)
    link = measure(pattern="exchange", gamma=True)
    assert link.seconds == {SIZES[0]: [20e-6, 20e-6, 30e-6], SIZES[1]: [1e-3, 1e-3, 9.0]}
    assert link.message_seconds(SIZES[0]) == pytest.approx(20e-6)
    assert link.message_seconds(SIZES[1]) == pytest.approx(1e-3)
    assert link.gamma_s_per_byte == pytest.approx(2e-3 / ADDED_BYTES)


def test_a_ping_pong_is_timed_by_the_rank_that_begins(monkeypatch):
    as_if_timed(monkeypatch, ([1e-6], [1e-3], []), ([9.0], [9.0], []))
    assert measure().seconds == {SIZES[0]: [1e-6], SIZES[1]: [1e-3]}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"world_size": 4}, "a ping-pong has 2 ranks, not 4: take pattern='exchange'"),
        ({"world_size": 1, "pattern": "exchange"}, "one rank has no link"),
        ({"pattern": "pingpong"}, "unknown pattern 'pingpong' .did you mean 'ping_pong'"),
        ({"repeats": 0}, "repeats must be an integer from 1 up"),
        ({"sizes_bytes": (2**20,)}, r"two different sizes, got \[1048576\]"),
        ({"sizes_bytes": (0, 2**20)}, "a size in bytes must be an integer from 1 up, got 0"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_process_starts(options, words):
    with pytest.raises(ValueError, match=words):
        labkit.measure_link(**options)
