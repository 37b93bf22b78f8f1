"""Numbers: read from text, checked, and written with their units."""

import pytest

from labkit.units import (
    as_repeats,
    check_choice,
    check_integer,
    check_number,
    format_bytes,
    format_seconds,
    parse_bytes,
)


def test_sizes_are_bytes_or_binary_units():
    sizes = [parse_bytes(text) for text in ("4", "4KiB", "1mib", "1 GiB")]
    assert sizes == [4, 4096, 2**20, 2**30]
    with pytest.raises(ValueError, match="size '4KB' is not known: give bytes, or KiB"):
        parse_bytes("4KB")


def test_limits_themselves_are_allowed():
    check_integer("n", 1)
    check_number("x", 0, 1)
    check_number("x", 1, 1)
    for value in (float("nan"), 1.5, True, "1"):
        with pytest.raises(ValueError, match="x must be"):
            check_number("x", value, 1)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (1023.9 * 1024, "1 MiB")],
)
def test_bytes_read_in_the_unit_that_fits(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (2.5e-10, "0.25 ns"), (0.0123, "12.3 ms"), (0.9996, "1 s"), (119.6, "1.99 min")],
)
def test_seconds_read_in_the_unit_that_fits(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize("wrong", ["3 ms", [], None, ["a"]])
def test_a_measurement_is_a_list_of_repeats(wrong):
    assert (as_repeats(2), as_repeats((1, 2))) == ([2.0], [1.0, 2.0])
    with pytest.raises(ValueError, match=r"number|at least once"):
        as_repeats(wrong)


@pytest.mark.parametrize("wrong", ["", None, ["a"], {}])
def test_what_is_not_among_the_known_is_refused_with_the_list(wrong):
    check_choice("letter", "a", {"a": 1, "b": 2})
    with pytest.raises(ValueError, match=r"unknown letter .*: choose one of a, b"):
        check_choice("letter", wrong, {"a": 1, "b": 2})
    with pytest.raises(ValueError, match=r"unknown model 'resnet' \(did you mean 'resnet18'\?\)"):
        check_choice("model", "resnet", ("vgg16", "resnet18"))
