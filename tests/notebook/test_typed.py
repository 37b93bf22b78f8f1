import pytest

from workbook.notebook.typed import parse_typed

READ = [
    ("0.003", "s", 0.003),
    ("1.5 ms", "s", 0.0015),
    ("1.5ms", "ms", 1.5),
    ("20 µs", "ms", 0.02),  # the micro sign, and the Greek letter
    ("20 μs", "ms", 0.02),
    ("1_000_000", "B", 1e6),
    ("2e6", "B", 2e6),
    ("-.5E-3 s", "ms", -0.5),
    ("3 mib", "KiB", 3072),
    ("3 MB", "bytes", 3e6),
    ("100 Mbit/s", "B/s", 12.5e6),
    ("12 %", "%", 12),
    ("12 %", "times", 0.12),
    ("4x", "times", 4),
    ("1 message", "messages", 1),
    ("16 micro-batches", "micro-batches", 16),
    ("~5 s", "s", 5),
    ("  7\u00a0s ", "s", 7),
]


@pytest.mark.parametrize(("text", "unit", "number"), READ)
def test_a_number_is_read_with_any_unit_of_the_same_kind(text, unit, number):
    assert parse_typed(text, unit) == pytest.approx(number, rel=1e-12)


REFUSED = [("3 MiB", "s"), ("3 ms", "bytes"), ("3 ms", "messages")]
REFUSED += [("5 m", "s")]  # minutes, milliseconds or meters
NO_NUMBERS = ("", "many", "nan", "inf", "10⁶", "1 2", "1..2", "f(1)", "a.b3", "1e999", "1,5")


@pytest.mark.parametrize(("text", "unit"), [*REFUSED, *((text, "s") for text in NO_NUMBERS)])
def test_what_is_not_such_a_number_is_refused(text, unit):
    with pytest.raises(ValueError, match=r"not one number|not a unit here"):
        parse_typed(text, unit)
