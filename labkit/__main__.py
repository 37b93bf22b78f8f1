"""The command line: ``python -m labkit train | explain | doctor``, and the commands of others.

A package above labkit adds commands by an entry point of the group ``labkit.commands``: a function
that takes argparse's subparsers and gives each of its parsers a ``run``.
"""

import argparse
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Collection
from dataclasses import fields
from importlib.metadata import entry_points
from typing import Any, NoReturn

from labkit import units
from labkit.config import RunConfig, type_of
from labkit.errors import MismatchError, OutputError, PreemptedError, WorkerError
from labkit.files import check_writable

_OWN = ("train", "explain", "doctor")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line. ``options_of`` are the options of each command."""

    options_of: dict[str, Collection[str]]

    def error(self, message: str) -> NoReturn:
        # One line, as for every usage error; argparse would print the usage before it.
        _refuse(f"{message} (see {self.prog} --help)")


def _refuse(message: str) -> NoReturn:
    print(f"labkit: error: {' '.join(message.splitlines())}", file=sys.stderr)
    raise SystemExit(2)


def make_parser(*, own_only: bool = False) -> _Parser:
    """The command line's parser; ``labkit train`` has an option for each field of RunConfig."""
    parser = _Parser(prog="labkit", description="Distributed training, learnt by running it.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    train = commands.add_parser("train", help="train with one technique on real processes")
    train.set_defaults(run=_train)
    add = train.add_argument
    for setting in fields(RunConfig):
        option, about = f"--{setting.name.replace('_', '-')}", setting.metadata["help"]
        if type_of(setting) is bool:
            add(option, action="store_true", help=about)
            continue
        required = setting.name == "strategy"
        shown = "" if setting.default is None or required else f" ({setting.default})"
        add(
            option,
            type=type_of(setting),
            default=argparse.SUPPRESS,
            required=required,
            metavar=setting.metadata["unit"],
            help=about + shown,
        )
    day_s, seconds = 24 * 3600, {"type": float, "metavar": "SECONDS"}
    add("--timeout", default=day_s, help="deadline of the run (one day)", **seconds)
    add("--download", action="store_true", help="fetch the data set if it is absent")
    add("--json", metavar="FILE", help="write settings, epochs, phases and bytes as JSON")
    add("--save", metavar="FILE", help="write the parameters as a safetensors file")
    explain = commands.add_parser("explain", help="say what limited a run, from its trace")
    files = "a trace of labkit's or, one per rank, of PyTorch's profiler: JSON or .json.gz"
    explain.add_argument("files", nargs="+", metavar="FILE", help=files)
    explain.set_defaults(run=_explain)
    doctor = commands.add_parser("doctor", help="check what this machine has and can do")
    doctor.set_defaults(run=_doctor)
    # Not for the commands above: these start without what others import.
    for point in () if own_only else entry_points(group="labkit.commands"):
        point.load()(commands)
    choices = commands.choices.items()
    parser.options_of = {name: command._option_string_actions for name, command in choices}
    return parser


def config_of(arguments: Namespace) -> RunConfig:
    """The settings from the command line; under torchrun the world size is torchrun's.

    Raises:
        ValueError: what ``RunConfig`` refuses.
    """
    names = {setting.name for setting in fields(RunConfig)}
    given: dict[str, Any] = {"world_size": int(os.environ.get("WORLD_SIZE", "1"))}
    given |= {name: value for name, value in vars(arguments).items() if name in names}
    return RunConfig(**given)


def _train(arguments: Namespace) -> int:
    from labkit import strategies
    from labkit.runtime import preload

    config = config_of(arguments)
    strategies.check_name(config.strategy)
    units.check_above_zero("--timeout", arguments.timeout, units.MOST_SECONDS)
    check_writable(arguments.json, arguments.save)
    # Before torch is imported here, so that both imports, some seconds each, run in parallel.
    preload.warm_up()
    from labkit.runtime import rounds
    from labkit.training.train_run import train_run

    if preload.under_torchrun() and config.world_size == int(os.environ["WORLD_SIZE"]):
        # Only rank 0 writes, and which machine that is nobody knows before.
        given = "".join(f"{o} " for o in ("json", "save") if getattr(arguments, o) is not None)
        found = rounds.join(min(arguments.timeout, 60.0))
        first, *others = found.exchange(given, "the options")
        if missing := sorted({o for text in others for o in text.split()} - {*first.split()}):
            raise ValueError(
                f"--{missing[0]} is not given on {found.hosts[0]}, whose rank 0 writes the file: "
                "start torchrun with the same command on every machine"
            )
    result = train_run(
        config, timeout_s=arguments.timeout, download=arguments.download, verbose=True
    )
    if preload.under_torchrun() and os.environ["RANK"] != "0":
        return 0
    try:
        if arguments.json is not None:
            result.save_json(arguments.json)
        if arguments.save is not None:
            result.save_state(arguments.save)
    finally:
        phases = ", ".join(f"{kind} {s:.2f} s" for kind, s in sorted(result.phases_s.items()))
        print(f"mean seconds per rank: {phases}")
        if result.bytes_sent is not None:
            print(f"bytes sent by rank: {result.bytes_sent}, in messages: {result.messages}")
        if any(result.peak_memory):
            peaks = "; ".join("lost" if one is None else str(one) for one in result.peak_memory)
            print(f"peak memory by rank: {peaks}")
        print(f"replicas agree: {result.replicas_agree}")
        if "note" in result.notes:
            print(result.notes["note"])
    return 0


def _explain(arguments: Namespace) -> int:
    from labkit.tracing.chrome import read_traces
    from labkit.tracing.limits import what_limited

    read = read_traces(arguments.files)
    print(f"{what_limited(read.trace, gap=read.gap)} {read.note}".rstrip())
    return 0


def _doctor(arguments: Namespace) -> int:
    from labkit.doctor import main as doctor

    return doctor()


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit status: 1 if a run or an output file failed.

    A usage error is printed as one line on stderr and exits with status 2.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser(own_only=bool(words) and words[0] in _OWN)
    arguments, arguments.rest = parser.parse_known_args(words)
    if arguments.rest and not hasattr(arguments, "takes_rest"):
        hint = units.closest(arguments.rest[0], parser.options_of[arguments.command])
        parser.error(f"unrecognized arguments: {' '.join(arguments.rest)}{hint}")
    try:
        arguments.words = words
        return arguments.run(arguments)
    # Under torchrun this process is a rank: lost peers and mismatches reach it as they are.
    except (WorkerError, OutputError, ConnectionError, MismatchError) as error:
        # (is_told: what torchrun's ranks have in common is told once on each host.)
        if not getattr(error, "is_told", False):
            print(f"labkit: {error}", file=sys.stderr)
        return 1
    except PreemptedError as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"labkit: {error}", file=sys.stderr)
        return 128 + signal.SIGTERM
    except (ValueError, OSError) as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        print("labkit: stopped; all ranks have ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
