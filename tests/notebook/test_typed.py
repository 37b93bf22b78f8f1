import re

import pytest

from workbook.notebook.typed import parse_typed

READ = [
    ("0.003", "s", 0.003),
    ("1.5 ms", "s", 0.0015),
    ("1.5ms", "ms", 1.5),
    ("20 µs", "ms", 0.02),  # the micro sign, and the Greek letter
    ("20 μs", "ms", 0.02),
    ("2 min", "s", 120),
    ("1,5", "times", 1.5),
    ("0,125", "s", 0.125),
    (".5", "s", 0.5),
    ("2e6", "B", 2e6),
    ("2E-3 s", "ms", 2),
    ("10^6", "B", 1e6),
    ("3 · 2**20 bytes", "MiB", 3),
    ("1/3", "times", 1 / 3),
    ("3 MiB", "bytes", 3 * 2**20),
    ("3 mib", "KiB", 3072),
    ("3 MB", "bytes", 3e6),
    ("100 Mbit/s", "B/s", 12.5e6),
    ("12 %", "%", 12),
    ("12 %", "times", 0.12),
    ("4x", "times", 4),
    ("4 ×", "times", 4),
    ("1 message", "messages", 1),
    ("16 micro-batches", "micro-batches", 16),
    ("5 exchanges", "exchanges", 5),
    ("1,000,000", "B", 1e6),
    ("1 000 000 B", "B", 1e6),
    ("1'000", "B", 1000),
    ("1.234,5", "s", 1234.5),
    ("1,234.5", "s", 1234.5),
    ("~5 s", "s", 5),
    ("−3", "s", -3),
    ("  7\u00a0s ", "s", 7),
]


@pytest.mark.parametrize(("text", "unit", "number"), READ)
def test_a_number_is_read_with_any_unit_of_the_same_kind(text, unit, number):
    assert parse_typed(text, unit) == pytest.approx(number, rel=1e-12)


REFUSED = [
    ("3 MiB", "s", "'MiB' is not a unit here: give it in s, as in 1.5 ms"),
    ("3 ms", "bytes", "give it in bytes, as in 3 MiB"),
    ("3 ms", "messages", "give it in messages, as in 12 messages"),
    ("5 m", "s", "'m' is not a unit"),  # minutes, milliseconds or metres
    ("1,500", "s", "1,500 may be 1500 or 1.500: type it without the comma"),
    ("", "s", "not one number"),
    ("many", "s", "not one number"),
    ("nan", "s", "not one number"),
    ("inf", "s", "not one number"),
    ("1e999", "s", "too large"),
    ("9**9999", "s", "too large"),
    ("10⁶", "s", "not one number"),
    ("1 2", "s", "not one number"),
    ("1..2", "s", "too many points"),
    ("1/0", "s", "divides by 0"),
    ("0^-1", "s", "divides by 0"),
]


@pytest.mark.parametrize(("text", "unit", "words"), REFUSED)
def test_what_is_not_such_a_number_is_refused_with_the_next_step(text, unit, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_typed(text, unit)
