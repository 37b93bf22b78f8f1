"""Options and settings: impossible values are refused before a rank starts."""

import argparse
import dataclasses
import inspect
import math

import pytest
from test_units import NOT_NUMBERS

from labkit import run, train_with
from labkit.__main__ import main, make_parser
from labkit.config import RunConfig
from labkit.runtime import supervisor
from labkit.training.resolve import make_strategy
from labkit.training.train_run import train_run
from workbook import measure
from workbook.measure import compare

BAD_INTEGERS = [*NOT_NUMBERS, "-1", "1.5", "1e3", "-0.0", str(10**30), "9" * 5000]
BAD_NUMBERS = [*NOT_NUMBERS, "-1", "-inf", "1e308", "1e999", "9" * 5000]
# In a list, blanks around the commas are allowed.
BAD_LISTS = [*(set(BAD_INTEGERS) - {" 4", "4 ", "4\n"}), "2,", ",2", "2,,2", "2,x", "2 3"]

# Texts to refuse, by option or by its placeholder in the help. A name may be any other text.
BAD = {
    **dict.fromkeys(("N", "B", "E", "K", "--servers", "--micro-batches"), BAD_INTEGERS),
    **dict.fromkeys(("N,N", "B,B"), BAD_LISTS),
    **dict.fromkeys(("S", "M", "D", "S,S", "M,M", "D,D", "FILE", "FILE.png", "DIR"), ()),
    **dict.fromkeys(("L", "O"), ()),
    "LATENCY,BANDWIDTH": [
        *("", "10", "x", "10ms,20ms", "-1ms", "1e400s", "10Mb/s", "0MB/s", "1ms,"),
        *("0 per host", "-1 per host", "1.5 per host", "x per host", "2 per host,3 per host"),
        *("99999 per host", "2 hosts"),
    ],
    "H": ["", "0", "-1", ",", "a,,b", "99999", "9" * 5000],
    "SECONDS": [*BAD_NUMBERS, "0", "-0.0"],
    "MB": BAD_NUMBERS,
    "X": [*BAD_NUMBERS, "1"],
    **dict.fromkeys(("DECAY", "EPOCHS"), BAD_NUMBERS),
    "NORM": [*BAD_NUMBERS, "0"],
    "PIXELS": BAD_INTEGERS,
    "A,A": ["", "crop,", "crop flip", "rotate"],
    "NAME,NAME": ["", ",", "features,"],
    "C,C": ["", ",", "nobody", "one device,", "one device,one device"],
    "--lr-schedule": ["", "linear", "step", "step:0:0.1", "step:2:0", "cosine:2"],
    **dict.fromkeys(("--weights", "--checkpoint-dir", "--log-dir"), ("",)),
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
    # Allowed: one stage, a learning rate that a float32 can hold, three hosts.
    fine = (("split_points", ""), ("lr", 10**30), ("hosts", 3))
    bad = [v for v in bad if (field.name, v) not in fine]
    for value in bad:
        with pytest.raises(ValueError, match=r"\w"):
            check_config({field.name: value})


def check_config(setting):
    config = RunConfig(**{"strategy": "single", **setting})
    # Names are looked up in the tables of what there is.
    if set(setting) & {"strategy", "model", "dataset", "device", "transport"}:
        make_strategy(config)
    elif set(setting) & {"loss", "optimizer"}:
        train_run(config)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (run, {"world_size": 1}),
        (train_with, {"strategy": "single"}),
        (compare.compare, {}),
        *((function, {}) for function in measure.BENCHES.values()),
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
