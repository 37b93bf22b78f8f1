"""The command line: ``python -m labkit train | explain | bench | compare | ... | lab``."""

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Collection
from dataclasses import Field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from labkit import units
from labkit.config import RunConfig
from labkit.errors import MismatchError, OutputError, PreemptedError, WorkerError
from labkit.files import check_outputs, write_each

if TYPE_CHECKING:
    from labkit.training.train_run import TrainResult


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line. ``options_of`` are the options of each command."""

    options_of: dict[str, Collection[str]]

    def error(self, message: str) -> NoReturn:
        # One line, as for every usage error; argparse would print the usage before it.
        _refuse(f"{message} (see {self.prog} --help)")


def _refuse(message: str) -> NoReturn:
    print(f"labkit: error: {' '.join(message.splitlines())}", file=sys.stderr)
    raise SystemExit(2)


def _typed(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """``parse``, whose error message is shown; argparse would show only the function's name."""

    def typed(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], tuple]:
    return _typed(lambda text: tuple(parse(word.strip()) for word in text.split(",")))


def _percent(text: str) -> float:
    try:
        return units.parse_number(text.removesuffix("%")) / 100
    except ValueError:
        raise ValueError(f"takes a percentage such as 95, got {text!r}") from None


_integer = _typed(units.parse_integer)
_integers = _list_of(units.parse_integer)


def make_parser() -> _Parser:
    """The command line's parser; ``labkit train`` has an option for each field of RunConfig."""
    parser = _Parser(prog="labkit", description="Distributed training, learnt by running it.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    _add_train(commands)
    explain = commands.add_parser("explain", help="say what limited a run, from its trace")
    files = "a trace of labkit's or, one per rank, of PyTorch's profiler: JSON or .json.gz"
    explain.add_argument("files", nargs="+", metavar="FILE", help=files)
    commands.add_parser("doctor", help="check what this machine has and can do")
    _add_bench(commands)
    _add_compare(commands)
    _add_gpu_report(commands)
    _add_progress(commands)
    commands.add_parser("lab", help="open the course; takes JupyterLab's own options too")
    choices = commands.choices.items()
    parser.options_of = {name: command._option_string_actions for name, command in choices}
    return parser


def _add_train(commands) -> None:
    train = commands.add_parser("train", help="train with one technique on real processes")
    for setting in fields(RunConfig):
        _add_setting(train, setting)
    add = train.add_argument
    seconds = {"type": _typed(units.parse_number), "metavar": "SECONDS"}
    add("--timeout", default=24 * 3600, help="deadline of the run (one day)", **seconds)
    add("--download", action="store_true", help="fetch the data set if it is absent")
    add("--json", metavar="FILE", help="write settings, epochs, phases and bytes as JSON")
    add("--save", metavar="FILE", help="write the parameters as a safetensors file")


def _add_setting(parser: argparse.ArgumentParser, setting: Field) -> None:
    option, about = f"--{setting.name.replace('_', '-')}", setting.metadata
    if setting.type is bool:
        parser.add_argument(option, action="store_true", help=about["help"])
        return
    required = setting.name == "strategy"
    default = "" if setting.default is None or required else f" ({setting.default})"
    parser.add_argument(
        option,
        type=_typed(about["parse"]),
        default=argparse.SUPPRESS,
        required=required,
        metavar=about["metavar"],
        help=about["help"] + default,
    )


def _add_bench(commands) -> None:
    bench = commands.add_parser("bench", help="measure labkit against PyTorch on this machine")
    add = bench.add_argument
    names = "launch, all-reduce, ddp, placement, pipeline, checkpoint: all of them if left out; "
    names += "two-hosts (root), elsewhere (other frameworks)"
    add("names", nargs="*", metavar="NAME", help=names)
    ranks = "numbers of ranks, one run each (2,4)"
    add("--world-size", dest="world_sizes", type=_integers, metavar="N,N", help=ranks)
    sizes = "all-reduce: tensor sizes, for example 4KiB,1MiB"
    parse_sizes = _list_of(units.parse_bytes)
    add("--sizes", dest="sizes_bytes", type=parse_sizes, metavar="SIZE,SIZE", help=sizes)
    add("--models", type=_list_of(str), metavar="M,M", help="ddp, pipeline: resnet18, vgg16")
    add("--contenders", type=_list_of(str), metavar="C,C", help="elsewhere: only these")
    add("--steps", type=_integer, metavar="N", help="elsewhere: steps of each contender (40)")
    add("--repeats", type=_integer, metavar="N", help="at most N repeats; slow ones get fewer")
    add("--device", metavar="auto|cpu|cuda", help="where the ranks run")
    add("--devices", type=_list_of(str), metavar="D,D", help="one for each rank: cuda:2,cuda:3")
    record = "record the results of one benchmark, and the hardware, in FILE"
    add("--json", dest="json_path", metavar="FILE", help=record)
    draw = "all-reduce, placement, two-hosts, elsewhere: draw the times, to FILE.png"
    add("--figure", dest="figure_path", metavar="FILE.png", help=draw)


def _add_compare(commands) -> None:
    compare = commands.add_parser("compare", help="all techniques and PyTorch's, like for like")
    add = compare.add_argument
    add_list = partial(add, type=_integers)
    some = "compare only these techniques, with PyTorch's counterparts"
    add("--strategies", type=_list_of(str), metavar="S,S", help=some)
    add_list("--world-size", dest="world_sizes", metavar="N,N", help="numbers of ranks (1,2,3,4)")
    samples = "numbers of training samples (a quarter, a half, all)"
    add_list("--train-size", dest="train_sizes", metavar="N,N", help=samples)
    add_list("--batch-size", dest="batch_sizes", metavar="B,B", help="global batches (64,128,256)")
    repeats = "runs of each technique; by default as many as fit into 8 minutes"
    add("--repeats", type=_integer, metavar="N", help=repeats)
    add("--epochs", type=_integer, metavar="E", help="epochs per run (6)")
    accuracy = "held-out accuracy to reach (95)"
    add("--target", type=_typed(_percent), metavar="PERCENT", help=accuracy)
    add("--model", metavar="M", help="as for train")
    add("--dataset", metavar="D", help="as for train")
    add("--device", metavar="auto|cpu|cuda", help="as for train")
    add("--json", dest="json_path", metavar="FILE", help="record runs and hardware in FILE")
    add("--figures", dest="figures_dir", metavar="DIR", help="draw compare_*.png in DIR")
    tables = "write compare_*.csv, the same numbers as tables, in DIR"
    add("--csv", dest="csv_dir", metavar="DIR", help=tables)
    add("--from", dest="from_path", metavar="FILE", help="print and draw a record, run nothing")


def _add_gpu_report(commands) -> None:
    add = commands.add_parser(
        "gpu-report", help="measure all that a GPU server can show"
    ).add_argument
    add("--out", metavar="FOLDER", help="the report's folder; continued if it is one (gpu-report)")
    minutes = "for everything, the most valuable steps first (30)"
    add("--minutes", type=_typed(units.parse_number), metavar="M", help=minutes)
    add("--steps", type=_list_of(str), metavar="S,S", help="only these: doctor, placements, ...")
    add("--quick", action="store_true", default=None, help="the least of each step, as a test")


def _add_progress(commands) -> None:
    progress = commands.add_parser("progress", help="exercises passed; predictions and reality")
    progress.add_argument("--json", action="store_true", help="print it as JSON")
    reset = "begin again; the old record is renamed and kept"
    progress.add_argument("--reset", action="store_true", help=reset)


def _train(arguments: argparse.Namespace) -> int:
    from labkit import strategies
    from labkit.runtime import preload

    config = config_of(arguments)
    strategies.check_name(config.strategy)
    units.check_above_zero("--timeout", arguments.timeout, units.MOST_SECONDS)
    check_outputs({"--json": arguments.json, "--save": arguments.save}, {})
    # Before torch is imported here, so that both imports, some seconds each, run in parallel.
    preload.warm_up()
    from labkit.training.train_run import train_run

    result = train_run(
        config, timeout_s=arguments.timeout, download=arguments.download, verbose=True
    )
    if not preload.under_torchrun() or os.environ["RANK"] == "0":
        _report(result, arguments)
    return 0


def config_of(arguments: argparse.Namespace) -> RunConfig:
    """The settings from the command line; under torchrun the world size is torchrun's.

    Raises:
        ValueError: what ``RunConfig`` refuses.
    """
    names = {setting.name for setting in fields(RunConfig)}
    given: dict[str, Any] = {"world_size": units.parse_integer(os.environ.get("WORLD_SIZE", "1"))}
    given |= {name: value for name, value in vars(arguments).items() if name in names}
    return RunConfig(**given)


def _report(result: "TrainResult", arguments: argparse.Namespace) -> None:
    outputs = ((arguments.json, result.save_json), (arguments.save, result.save_state))
    try:
        write_each(*(partial(save, path) for path, save in outputs if path is not None))
    finally:
        _print_summary(result)


def _print_summary(result: "TrainResult") -> None:
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


def _explain(arguments: argparse.Namespace) -> int:
    from labkit.runtime.chrome_trace import read_traces
    from labkit.runtime.limits import what_limited

    read = read_traces(arguments.files)
    print(f"{what_limited(read.trace, gap=read.gap)} {read.note}".rstrip())
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    from labkit.doctor import main as doctor

    return doctor()


def _bench(arguments: argparse.Namespace) -> int:
    check_outputs({"--json": arguments.json_path, "--figure": arguments.figure_path}, {})
    from labkit.bench.command import main as bench

    return bench(**_given(arguments))


def _compare(arguments: argparse.Namespace) -> int:
    check_outputs({"--json": arguments.json_path}, {"--from": arguments.from_path})
    from labkit.bench.compare.command import main as compare

    return compare(**_given(arguments))


def _gpu_report(arguments: argparse.Namespace) -> int:
    from labkit.bench.gpu_report.command import main as gpu_report
    from labkit.lab import workbook_root

    given, root = _given(arguments), None
    with contextlib.suppress(ValueError):
        root = workbook_root()
    return gpu_report(**{name: given[name] for name in given if name != "words"}, root=root)


def _progress(arguments: argparse.Namespace) -> int:
    from labkit.notebook import progress

    if arguments.reset:
        print(progress.reset())
        return 0
    shown = progress.progress()
    print(shown.to_json() if arguments.json else shown)
    return 0


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, and the words of the command line, which are recorded."""
    options = {name: value for name, value in vars(arguments).items() if value is not None}
    return {name: value for name, value in options.items() if name not in ("command", "rest")}


def _lab(arguments: argparse.Namespace) -> int:
    from labkit.lab import main as lab

    return lab(arguments.rest)


_COMMANDS = dict(train=_train, explain=_explain, bench=_bench, compare=_compare)
_COMMANDS["gpu-report"] = _gpu_report
_COMMANDS |= dict(progress=_progress, doctor=_doctor, lab=_lab)


def main(argv: list[str] | None = None) -> int:
    """Run a command. Returns the exit status: 1 if a run or an output file failed.

    A usage error is printed as one line on stderr and exits with status 2.
    """
    parser, words = make_parser(), sys.argv[1:] if argv is None else argv
    arguments, arguments.rest = parser.parse_known_args(words)
    if arguments.rest and arguments.command != "lab":
        hint = units.closest(arguments.rest[0], parser.options_of[arguments.command])
        parser.error(f"unrecognized arguments: {' '.join(arguments.rest)}{hint}")
    try:
        arguments.words = words
        return _COMMANDS[arguments.command](arguments)
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
