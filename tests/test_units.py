"""Numbers: refused before a rank starts where they cannot be, and written with their units."""

import argparse
import dataclasses
import inspect
import math

import pytest

from labkit import bench, run, train_with
from labkit.__main__ import main, make_parser
from labkit.bench import compare
from labkit.config import RunConfig
from labkit.runtime import supervisor
from labkit.training.train_run import check
from labkit.units import (
    MOST,
    MOST_RANKS,
    as_repeats,
    byte_unit,
    check_above_zero,
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
)

# "١٢" are the digits 1 and 2 in Arabic script, "４" a wide 4; int() and float() take both.
NOT_NUMBERS = ["", " ", "x", "+4", "1_0", " 4", "4 ", "4\n", "١٢", "４", "0x4", "nan", "inf", "1e"]
BAD_INTEGERS = [*NOT_NUMBERS, "-1", "1.5", "1e3", "-0.0", str(10**30), "9" * 5000]
BAD_NUMBERS = [*NOT_NUMBERS, "-1", "-inf", "1e308", "1e999", "9" * 5000]
# In a list, blanks around the commas are allowed.
BAD_LISTS = [*(set(BAD_INTEGERS) - {" 4", "4 ", "4\n"}), "2,", ",2", "2,,2", "2,x", "2 3"]

# By option, or by what the help shows for it: texts to refuse. A name may be any other text.
BAD = {
    **dict.fromkeys(("N", "B", "E", "K", "--servers", "--micro-batches"), BAD_INTEGERS),
    **dict.fromkeys(("N,N", "B,B"), BAD_LISTS),
    **dict.fromkeys(("S", "M", "D", "S,S", "M,M", "D,D", "FILE", "FILE.png", "DIR"), ()),
    "SECONDS": [*BAD_NUMBERS, "0", "-0.0"],
    "MB": BAD_NUMBERS,
    "X": [*BAD_NUMBERS, "1"],
    "RATE": [*BAD_NUMBERS, "0"],
    "PERCENT": [*BAD_NUMBERS, "0", "101", "95%%"],
    "SIZE,SIZE": [*BAD_LISTS, "4KB", "4XiB", "99999999TiB", "999999999GiB"],
    "K,K": [*(set(BAD_LISTS) - {"", " "}), "1e1"],
    "RANK:FACTOR": ["", "1", ":", "1:", ":2", "١:2", "1:٢", "1:1e300", "1:nan", "+1:2", "1:2:3"],
}


@pytest.fixture
def no_ranks(monkeypatch):
    def started(*args, **kwargs):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(supervisor.Supervisor, "run", started)
    monkeypatch.setattr("labkit.runtime.preload.warm_up", lambda **_: None)


def bad_options(command):
    commands = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for action in commands.choices[command]._actions:
        if action.nargs == 0 or not action.option_strings:
            continue
        option, shown = action.option_strings[0], action.metavar or ""
        for text in BAD.get(option, ("", "x") if "|" in shown else BAD.get(shown)):
            yield option, text


def refused(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    printed = capsys.readouterr()
    assert caught.value.code == 2, words
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("labkit: error: "), line
    assert len(line) < 300
    return line


@pytest.mark.parametrize(
    "command",
    [["train", "--strategy", "single"], ["bench", "all-reduce"], ["compare"]],
    ids=lambda words: words[0],
)
def test_no_option_takes_a_number_that_cannot_be(command, no_ranks, capsys):
    tried = list(bad_options(command[0]))
    assert len(tried) > 50
    for option, text in tried:
        line = refused([*command, f"{option}={text}"], capsys)
        name = option.removeprefix("--")
        said = name in line or name.replace("-", "_") in line
        said = said or {"--sizes": "size", "--models": "bench all-reduce"}.get(option, "?") in line
        assert said, (option, text, line)
        assert "takes no option" not in line, (option, text, line)


WRONG_TYPES = [True, "4", [], object(), math.nan, math.inf, -math.inf, -1, 10**30, 10**5000]


@pytest.mark.parametrize("field", dataclasses.fields(RunConfig), ids=lambda field: field.name)
def test_no_setting_takes_a_value_that_cannot_be(field, no_ranks):
    kind = str(field.type)
    bad = {"bool": [], "str": [None, 3, [], b"x"]}.get(kind, ["", 3, [], b"x"])
    if "int" in kind or "float" in kind:
        bad = [*WRONG_TYPES, *([2.5] if "int" in kind else ())]
        bad += [None] if "None" not in kind else []
    # These two are allowed: one stage, and a rate that a float holds.
    bad = [v for v in bad if (field.name, v) not in (("split_points", ""), ("lr", 10**30))]
    for value in bad:
        with pytest.raises(ValueError, match=r"\w"):
            check_config({field.name: value})


def check_config(setting):
    config = RunConfig(**{"strategy": "single", **setting})
    # Names are looked up in the tables of what there is.
    if set(setting) & {"strategy", "model", "dataset", "device", "transport"}:
        check(config)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (run, {"world_size": 1}),
        (train_with, {"strategy": "single"}),
        (compare.compare, {}),
        *((function, {}) for function in bench.BENCHES.values()),
    ],
)
def test_no_function_takes_a_number_that_cannot_be(function, arguments, no_ranks):
    numbers = {"world_size", "timeout_s", "repeats", "epochs", "target", "budget_s"}
    lists = {"world_sizes", "train_sizes", "batch_sizes", "sizes_bytes"}
    names = inspect.signature(function).parameters.keys()
    first = [lambda comm: None] if function is run else []
    assert names & (numbers | lists)
    for name in names & (numbers | lists):
        for value in [*WRONG_TYPES, 0]:
            given = arguments | {name: (value,) if name in lists else value}
            with pytest.raises(ValueError, match=r"\w"):
                function(*first, **given)


def test_may_lose_takes_ranks_only(no_ranks):
    for rank in (True, "1", [], math.nan, -1, 2, 10**30, None):
        with pytest.raises(ValueError, match="may_lose"):
            run(lambda comm: None, world_size=2, may_lose=[rank])


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
