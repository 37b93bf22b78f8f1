"""Numbers: read from text, checked, and written with their units."""

import pytest

from labkit.config import RunConfig
from labkit.units import (
    MOST,
    MOST_RANKS,
    as_repeats,
    byte_unit,
    check_above_zero,
    check_choice,
    check_integer,
    check_number,
    format_bytes,
    format_count,
    format_number,
    format_seconds,
    format_value,
    parse_bytes,
    parse_integer,
    parse_number,
    second_unit,
    spelling,
)

# "١٢" are the digits 1 and 2 in Arabic script, "４" a wide 4; int() and float() take both.
NOT_NUMBERS = ["", " ", "x", "+4", "1_0", " 4", "4 ", "4\n", "١٢", "４", "0x4", "nan", "inf", "1e"]


def test_numbers_are_written_with_the_digits_0_to_9():
    assert [parse_integer(text) for text in ("0", "12", "-3", "007")] == [0, 12, -3, 7]
    assert [parse_number(text) for text in ("1", ".5", "1.", "2.5e-3")] == [1, 0.5, 1, 0.0025]
    for text in NOT_NUMBERS:
        for parse, kind in ((parse_integer, "an integer"), (parse_number, "a number")):
            with pytest.raises(ValueError, match=f"is not {kind}"):
                parse(text)


def test_sizes_are_bytes_or_binary_units():
    sizes = [parse_bytes(text) for text in ("4", "4KiB", "1mib", "1 GiB")]
    assert sizes == [4, 4096, 2**20, 2**30]
    with pytest.raises(ValueError, match="size '4KB' is not known: give bytes, or KiB"):
        parse_bytes("4KB")


def test_limits_themselves_are_allowed():
    for value in (1, MOST):
        check_integer("n", value)
    check_number("x", 0, 0, 1)
    check_number("x", 1, 0, 1)
    check_above_zero("x", 5e-324, 1)
    RunConfig(batch_size=MOST, world_size=MOST_RANKS, train_size=MOST, seed=0, max_staleness=0)
    RunConfig(lr=1e308, dtype="float64")


def test_one_is_singular():
    counts = [format_count(count, "rank") for count in (0, 1, 2)]
    assert counts == ["0 ranks", "1 rank", "2 ranks"]
    assert format_count(3, "micro-batch") == "3 micro-batches"
    assert format_count(3, "epoch") == "3 epochs"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1,023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1023.9 * 1024, "1 MiB"),
        (12_582_912, "12 MiB"),
        (5 * 2**30, "5 GiB"),
        (2**70, "1,048,576 PiB"),
        (-2048, "-2 KiB"),
    ],
)
def test_bytes_read_in_the_unit_that_fits(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (2.5e-10, "0.25 ns"),
        (3e-5, "30 µs"),
        (0.0123, "12.3 ms"),
        (0.5151, "515 ms"),
        (0.9996, "1 s"),
        (42.0, "42 s"),
        (119.4, "119 s"),
        (125, "2 min 5 s"),
        (119.6, "2 min 0 s"),
        (2 * 3600 + 300, "2 h 5 min"),
        (-0.002, "-2 ms"),
    ],
)
def test_seconds_read_in_the_unit_that_fits(seconds, text):
    assert format_seconds(seconds) == text


def test_what_is_not_finite_is_said_so():
    assert format_seconds(float("nan")).startswith("nan")
    assert format_seconds(float("inf")).startswith("inf")
    assert format_bytes(float("nan")).startswith("nan")


def test_a_unit_and_its_scale_belong_together():
    assert byte_unit(3 * 2**20) == (2**20, "MiB")
    assert second_unit(0.004) == (1e-3, "ms")
    assert second_unit(0) == (1.0, "s")


def test_other_units_stay_as_they_are():
    assert format_value(2048, "bytes") == "2 KiB"
    assert format_value(0.002, "s") == "2 ms"
    assert format_value(1200, "messages") == "1,200 messages"
    assert format_number(0.12345) == "0.123"


def test_a_measurement_is_a_list_of_repeats():
    assert as_repeats(2) == [2.0]
    assert as_repeats((1, 2)) == [1.0, 2.0]


@pytest.mark.parametrize("wrong", ["3 ms", [], None, ["a"]])
def test_what_is_not_a_measurement_is_refused(wrong):
    with pytest.raises(ValueError, match=r"number|at least once"):
        as_repeats(wrong)


@pytest.mark.parametrize("wrong", ["c", "", None, ["a"], {}])
def test_what_is_not_among_the_known_is_refused_with_the_list(wrong):
    check_choice("letter", "a", {"a": 1, "b": 2})
    with pytest.raises(ValueError, match=r"unknown letter .*: choose one of a, b"):
        check_choice("letter", wrong, {"a": 1, "b": 2})


def test_a_choice_like_a_known_one_names_it():
    with pytest.raises(ValueError, match=r"unknown model 'resnet' \(did you mean 'resnet18'\?\)"):
        check_choice("model", "resnet", ("vgg16", "resnet18"))
    with pytest.raises(ValueError, match=r"unknown model 3: choose one of"):
        check_choice("model", 3, ("vgg16", "resnet18"))


def test_an_objects_own_dir_may_fail():
    class Odd:
        def __dir__(self):
            raise KeyError

    assert spelling(AttributeError("no", name="x", obj=Odd())) == ""
    assert spelling(AttributeError("no", name="append_", obj=[])).endswith("'append'?)")
    assert spelling(AttributeError("no")) == spelling(ValueError("no")) == ""
