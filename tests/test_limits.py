"""Numbers that cannot be are refused before a rank starts, wherever they are given."""

import argparse
import dataclasses
import inspect
import math

import pytest

from labkit import bench, train_with
from labkit.__main__ import main, make_parser
from labkit.bench import compare
from labkit.config import RunConfig
from labkit.runtime import supervisor
from labkit.runtime.launch import run
from labkit.training.settings import make_strategy
from labkit.units import (
    MOST,
    MOST_RANKS,
    check_above_zero,
    check_integer,
    check_number,
    parse_integer,
    parse_number,
)

# "١٢" are the digits 1 and 2 in Arabic script, "４" a wide 4; int() and float() take both.
NO_NUMBERS = ["", " ", "x", "+4", "1_0", " 4", "4 ", "4\n", "١٢", "４", "0x4", "nan", "inf", "1e"]
BAD_WHOLE = [*NO_NUMBERS, "-1", "1.5", "1e3", "-0.0", str(10**30), "9" * 5000]
BAD_NUMBERS = [*NO_NUMBERS, "-1", "-inf", "1e308", "1e999", "9" * 5000]
BAD_LISTS = [*BAD_WHOLE, "2,", ",2", "2,,2", "2,x", "2 3"]

# By what the help shows for an option: texts that it must refuse; none where it takes a name.
BAD = {
    "N": BAD_WHOLE,
    "B": BAD_WHOLE,
    "E": BAD_WHOLE,
    "K": BAD_WHOLE,
    "SECONDS": [*BAD_NUMBERS, "0", "-0.0"],
    "MB": BAD_NUMBERS,
    "PERCENT": [*BAD_NUMBERS, "0", "101", "95%%"],
    "N,N": BAD_LISTS,
    "B,B": BAD_LISTS,
    "SIZE,SIZE": [*(set(BAD_LISTS) - {"4 "}), "4KB", "4XiB", "99999999TiB", "999999999GiB"],
    "K,K": [*(set(BAD_LISTS) - {"", " ", " 4", "4 ", "4\n"}), "1e1"],
    "RANK:FACTOR": ["", "1", ":", "1:", ":2", "١:2", "1:٢", "1:1e300", "1:nan", "+1:2", "1:2:3"],
    **{name: () for name in ("S", "M", "D", "S,S", "M,M", "D,D", "FILE", "FILE.png", "DIR")},
}
BAD_BY_OPTION = {
    "--servers": BAD_WHOLE,
    "--micro-batches": BAD_WHOLE,
    "--momentum": [*BAD_NUMBERS, "1"],
    "--lr": [*BAD_NUMBERS, "0"],
}
# Options where a list may have blanks around its commas, so that a blank is no fault.
BLANKS = {"N,N", "B,B", "SIZE,SIZE"}


@pytest.fixture(autouse=True)
def _no_ranks(monkeypatch):
    def started(*args, **kwargs):
        raise AssertionError("ranks were started")

    monkeypatch.setattr(supervisor.Supervisor, "run", started)
    monkeypatch.setattr("labkit.runtime.preload.warm_up", started)
    monkeypatch.setattr("labkit.runtime.preload.warm_up", lambda **_: None)
    monkeypatch.setattr("labkit.runtime.preload.warm_up", lambda **_: None)


def bad_options():
    commands = next(a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    for command in ("train", "bench", "compare"):
        for action in commands.choices[command]._actions:
            if action.nargs == 0 or not action.option_strings:
                continue
            option, shown = action.option_strings[0], action.metavar
            if option in BAD_BY_OPTION:
                texts = BAD_BY_OPTION[option]
            elif shown is None or "|" in shown:
                texts = ["", "x"]
            else:
                texts = BAD[shown]
            blank = {" 4", "4 ", "4\n"} if shown in BLANKS else set()
            for text in texts:
                if text not in blank:
                    yield command, option, text


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


@pytest.mark.parametrize("command", ["train", "bench", "compare"])
def test_no_option_takes_a_number_that_cannot_be(command, capsys):
    first = {
        "train": ["train", "--strategy", "single"],
        "bench": ["bench", "all-reduce"],
        "compare": ["compare"],
    }[command]
    tried = [(option, text) for name, option, text in bad_options() if name == command]
    assert len(tried) > 50
    for option, text in tried:
        line = refused([*first, f"{option}={text}"], capsys)
        name = option.removeprefix("--")
        said = name in line or name.replace("-", "_") in line
        said = said or {"--sizes": "size", "--models": "bench all-reduce"}.get(option, "?") in line
        assert said, (option, text, line)
        assert "takes no option" not in line, (option, text, line)


WRONG_TYPES = [True, "4", [], object(), math.nan, math.inf, -math.inf, -1, 10**30, 10**5000]


@pytest.mark.parametrize("field", dataclasses.fields(RunConfig), ids=lambda field: field.name)
def test_no_setting_takes_a_value_that_cannot_be(field):
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
        make_strategy(config)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (run, {"world_size": 1}),
        (train_with, {"strategy": "single"}),
        (compare.compare, {}),
        *((function, {}) for function in bench.BENCHES.values()),
    ],
)
def test_no_function_takes_a_number_that_cannot_be(function, arguments):
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


def test_may_lose_takes_ranks_alone():
    for rank in (True, "1", [], math.nan, -1, 2, 10**30, None):
        with pytest.raises(ValueError, match="may_lose"):
            run(lambda comm: None, world_size=2, may_lose=[rank])


def test_numbers_are_written_with_the_digits_0_to_9():
    assert [parse_integer(text) for text in ("0", "12", "-3", "007")] == [0, 12, -3, 7]
    assert [parse_number(text) for text in ("1", ".5", "1.", "2.5e-3")] == [1, 0.5, 1, 0.0025]
    for text in NO_NUMBERS:
        for parse in (parse_integer, parse_number):
            with pytest.raises(ValueError, match=r"is not an? (integer|number)"):
                parse(text)


def test_limits_themselves_are_allowed():
    for value in (1, MOST):
        check_integer("n", value)
    check_number("x", 0, 0, 1)
    check_number("x", 1, 0, 1)
    check_above_zero("x", 5e-324, 1)
    RunConfig(batch_size=MOST, world_size=MOST_RANKS, train_size=MOST, seed=0, max_staleness=0)
    RunConfig(lr=1e308, dtype="float64")
