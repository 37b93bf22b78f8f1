"""The measured link: a fit of what the ranks have timed, and a line that says how."""

import pytest

import labkit
from labkit.costs.link import Link

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
