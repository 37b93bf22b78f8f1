"""The alpha-beta model: a fit finds the line that its measurements were made from."""

import math

import pytest

from labkit.costs.link import Link, fit_link

SIZES = [2**k for k in range(10, 27)]


@pytest.mark.parametrize(("alpha_s", "beta"), [(50e-6, 3e-10), (1e-6, 2e-11), (0.5, 1e-6)])
def test_a_fit_finds_the_line_it_was_made_from(alpha_s, beta):
    link = fit_link(SIZES, [alpha_s + beta * size for size in SIZES])
    assert link.alpha_s == pytest.approx(alpha_s, rel=1e-6)
    assert link.beta_s_per_byte == pytest.approx(beta, rel=1e-6)


def test_a_fit_is_never_negative():
    down = fit_link([1e3, 1e6], [2e-3, 1e-3])
    assert down.beta_s_per_byte == 0
    assert 1e-3 <= down.alpha_s <= 2e-3
    below_zero = fit_link([1e3, 1e6, 2e6], [1e-6, 3e-3, 9e-3])
    assert below_zero.alpha_s == 0
    assert below_zero.beta_s_per_byte > 0
    assert fit_link([0, 100], [1e-6, 2e-6], gamma_s_per_byte=1e-9).gamma_s_per_byte == 1e-9


@pytest.mark.parametrize(
    ("sizes", "seconds", "words"),
    [
        ([1, 2], [1.0], "2 sizes and 1 time:"),
        ([8, 8], [1.0, 2.0], r"two different sizes, got \[8\]"),
        ([1, 2], [1.0, math.nan], "not a measurement"),
    ],
)
def test_what_cannot_be_fitted_is_named(sizes, seconds, words):
    with pytest.raises(ValueError, match=words):
        fit_link(sizes, seconds)


def test_a_link_has_no_negative_cost():
    with pytest.raises(ValueError, match="alpha_s is -1"):
        Link(-1, 0)
    with pytest.raises(ValueError, match="beta_s_per_byte is inf"):
        Link(0, math.inf)
    assert Link(2.0, 0.5).message_seconds(4) == 4.0


def test_a_link_prints_in_the_units_of_its_costs():
    assert str(Link(52e-6, 1 / 3.1e9)) == "52 µs per message, 3.1 GB/s"
    assert str(Link(0.01, 1 / 12.5e6, 1 / 8e9)) == "10 ms per message, 12.5 MB/s, 8 GB/s added"
    assert str(Link(0, 0)) == "0 s per message, bytes at no cost"
