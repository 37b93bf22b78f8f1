"""The command line, ``python -m labkit train | diff | explain | doctor``, and others' commands.

A package above labkit adds commands by an entry point of the group ``labkit.commands``: a function
that takes argparse's subparsers and gives each of its parsers a ``run``.
"""

import argparse
import os
import shlex
import signal
import sys
from argparse import Namespace
from dataclasses import fields
from importlib.metadata import entry_points
from typing import Any, NoReturn

from labkit.engine.errors import MismatchError, OutputError, PreemptedError, WorkerError
from labkit.engine.files import check_writable
from labkit.engine.started import is_rank_0, started_as_rank
from labkit.extras import describe_absence, extra_of
from labkit.training.config import RunConfig, parse_link, parse_straggler, type_of


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line; argparse would print the usage before it."""

    def error(self, message: str) -> NoReturn:
        _refuse(f"{message} (see {self.prog} --help)")


def _refuse(message: str) -> NoReturn:
    print(f"labkit: error: {' '.join(message.splitlines())}", file=sys.stderr)
    raise SystemExit(2)


def make_parser() -> argparse.ArgumentParser:
    """The command line's parser; ``labkit train`` has an option for each field of RunConfig."""
    parser = _Parser(prog="labkit", description="Distributed training, learned by running it.")
    # torch.distributed.launch gives it to every program; what counts is the environment.
    parser.add_argument(
        "--local-rank", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    train = commands.add_parser("train", help="train with one technique on real processes")
    train.set_defaults(run=_train)
    _add_settings(train, needs_strategy=True)
    add = train.add_argument
    add("--timeout", type=float, default=24 * 3600, help="deadline in seconds (one day)")
    add("--download", action="store_true", help="fetch the data set if it is absent")
    add("--json", metavar="FILE", help="write settings, epochs, phases and bytes as JSON")
    add("--save", metavar="FILE", help="write the parameters as a safetensors file")
    add("--trace", metavar="FILE", help="write the trace of all ranks as Chrome trace JSON")
    diff = commands.add_parser("diff", help="say where two layouts of one training run part")
    folders = "two recorded runs (train --record); without them, two are trained and compared"
    diff.add_argument("folders", nargs="*", metavar="DIR", help=folders)
    against = "the other layout: a technique and its options (single)"
    diff.add_argument("--against", default="single", metavar="'T --OPTION N'", help=against)
    diff.add_argument("--steps", type=int, default=5, metavar="N", help="updates to compare (5)")
    _add_settings(diff)
    diff.set_defaults(run=_diff)
    explain = commands.add_parser("explain", help="say what limited a run, or holds it up")
    files = (
        "a trace of labkit's; one per rank, or a folder of them: profiles of PyTorch's profiler, "
        "flight recorder dumps, torchtitan's structured logs; a page of PyTorch's debug server"
    )
    explain.add_argument("files", nargs="+", metavar="FILE", help=files)
    add = explain.add_argument
    add("--link", metavar="L,B", help="predict a trace of labkit's over a link, as 10ms,1GB/s")
    straggler = "predict it with rank R computing F times as long; may be given several times"
    add("--straggler", action="append", metavar="R:F", help=straggler)
    ranks = "predict it on N ranks, for data parallelism by ring"
    add("--ranks", type=int, metavar="N", help=ranks)
    add("--out", metavar="FILE", help="write the predicted trace as Chrome trace JSON")
    explain.set_defaults(run=_explain)
    doctor = commands.add_parser("doctor", help="check what this machine has and can do")
    doctor.set_defaults(run=_doctor)
    points = entry_points(group="labkit.commands")
    # By name: an environment may hold labkit under the distribution's former name, too.
    for name in sorted(points.names):
        points[name].load()(commands)
    return parser


def _add_settings(parser: argparse.ArgumentParser, needs_strategy: bool = False) -> None:
    for setting in fields(RunConfig):
        option: dict[str, Any] = {"default": argparse.SUPPRESS, "help": setting.metadata["help"]}
        if setting.default:
            option["help"] += f" ({setting.default})"
        if type_of(setting) is bool:
            option["action"] = "store_true"
        else:
            option["type"] = type_of(setting)
        if setting.name == "strategy":
            option["required"] = needs_strategy
        parser.add_argument(f"--{setting.name.replace('_', '-')}", **option)


def config_of(arguments: Namespace) -> RunConfig:
    """The settings from the command line; in a rank of a launcher the world size is its."""
    started = started_as_rank()
    settings: dict[str, Any] = {"world_size": 1 if started is None else started.world_size}
    for setting in fields(RunConfig):
        if hasattr(arguments, setting.name):
            settings[setting.name] = getattr(arguments, setting.name)
    return RunConfig(**settings)


def _end_at_sigterm() -> None:
    """Let files that are being written, and all ranks, end as after an error."""
    if started_as_rank() is None:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def _train(arguments: Namespace) -> int:
    config = config_of(arguments)
    check_writable(arguments.json, arguments.save, arguments.trace)
    from labkit.engine.runtime import preload

    _end_at_sigterm()
    # Before torch is imported here, so that both imports, some seconds each, run in parallel.
    preload.warm_up()
    from labkit.training.train_run import train_run

    result = train_run(
        config, timeout_s=arguments.timeout, download=arguments.download, verbose=True
    )
    if not is_rank_0():
        return 0
    phases = ", ".join(f"{kind} {s:.2f} s" for kind, s in sorted(result.phases_s.items()))
    print(f"mean seconds per rank: {phases}")
    if result.bytes_sent is not None:
        print(f"bytes sent by rank: {result.bytes_sent}, in messages: {result.messages}")
    peaks = "; ".join(str(peak or "lost") for peak in result.peak_memory)
    print(f"peak memory by rank: {peaks}\nreplicas agree: {result.replicas_agree}")
    if "note" in result.notes:
        print(result.notes["note"])
    if arguments.json:
        result.save_json(arguments.json)
    if arguments.save:
        result.save_state(arguments.save)
    if arguments.trace:
        result.trace.save(arguments.trace)
    return 0


def _diff(arguments: Namespace) -> int:
    names = [setting.name for setting in fields(RunConfig)]
    settings = {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}
    if len(arguments.folders) not in (0, 2) or bool(arguments.folders) == ("strategy" in settings):
        raise ValueError(
            "give two folders of recorded runs, or --strategy and the options of the layout to "
            "compare"
        )
    _end_at_sigterm()
    from labkit.training.diff import diff, diff_records

    if arguments.folders:
        comparison = diff_records(*arguments.folders)
    else:
        words = shlex.split(arguments.against)
        other = make_parser().parse_args(["train", "--strategy", *words])
        against = {name: getattr(other, name) for name in names if hasattr(other, name)}
        comparison = diff(**settings, against=against, steps=arguments.steps)
    print(comparison)
    return 0 if comparison.equal else 1


def _explain(arguments: Namespace) -> int:
    conditions = (arguments.link, arguments.straggler, arguments.ranks, arguments.out)
    if all(condition is None for condition in conditions):
        from labkit.engine.tracing.explain import explain

        print(explain(arguments.files))
        return 0
    check_writable(arguments.out)
    from labkit.costs.what_if import what_if
    from labkit.engine.comm.emulated_link import EmulatedLink
    from labkit.engine.tracing.chrome import read_traces
    from labkit.engine.tracing.load import list_files

    for path in list_files(arguments.files):
        if arguments.out and os.path.realpath(path) == os.path.realpath(arguments.out):
            raise ValueError(f"out {arguments.out} is the recorded trace: give another file")
    trace, _ = read_traces(arguments.files)
    link = None
    if arguments.link is not None:
        link = EmulatedLink(**parse_link(arguments.link))
    num_ranks = len(trace.ranks) if arguments.ranks is None else arguments.ranks
    given = [parse_straggler(text, num_ranks) for text in arguments.straggler or ()]
    stragglers = dict(given)
    if len(stragglers) < len(given):
        raise ValueError(f"straggler {', '.join(arguments.straggler)}: name each rank once")
    prediction = what_if(trace, link=link, stragglers=stragglers, ranks=arguments.ranks)
    print(prediction)
    if arguments.out:
        prediction.predicted.save(arguments.out)
    return 0


def _doctor(arguments: Namespace) -> int:
    from labkit.training.doctor import main as doctor

    return doctor()


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit status: 1 if a run or an output file failed.

    A usage error is printed as one line on stderr and exits with status 2.
    """
    words = sys.argv[1:] if argv is None else argv
    parser = make_parser()
    arguments, rest = parser.parse_known_args(words)
    if rest and not hasattr(arguments, "takes_rest"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.rest = rest
    arguments.words = words
    try:
        return arguments.run(arguments)
    except PreemptedError as error:
        if is_rank_0():
            print(f"labkit: {error}", file=sys.stderr)
        return 128 + signal.SIGTERM
    # In a rank of a launcher: lost peers and mismatches reach it as they are.
    except (WorkerError, OutputError, ConnectionError, MismatchError) as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        _refuse(str(error))
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if extra_of(package) is None:
            raise
        _refuse(describe_absence(package, f"labkit {arguments.command}"))
    except KeyboardInterrupt:
        print("labkit: stopped; all ranks have ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
