"""The command line: ``python -m labkit train | bench | compare | doctor | lab``. It parses and
calls."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from labkit import units
from labkit.config import AMP, BACKENDS, COMPRESSIONS, DTYPES, RunConfig
from labkit.errors import OutputError, WorkerError
from labkit.files import check_outputs, write_each
from labkit.schedules.pipeline import PIPELINES


class _Parser(argparse.ArgumentParser):
    def error(self, message: str):
        # One line, as every error of use; argparse would print the usage before it.
        _refuse(f"{message} (see {self.prog} --help)")


def _refuse(message: str):
    print(f"labkit: error: {' '.join(message.splitlines())}", file=sys.stderr)
    raise SystemExit(2)


def _typed(parse: Callable[[str], Any], text: str) -> Any:
    """A value of the command line; what argparse would say instead names our function."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_whole = partial(_typed, units.parse_whole)
_number = partial(_typed, units.parse_number)
_percent = partial(_typed, lambda text: units.parse_number(text.removesuffix("%")) / 100)


def _list_of(parse: Callable[[str], Any]) -> Callable[[str], tuple]:
    """Values with commas between them."""
    return partial(_typed, lambda text: tuple(parse(word.strip()) for word in text.split(",")))


_names, _wholes = _list_of(str), _list_of(units.parse_whole)
_sizes = _list_of(units.parse_bytes)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="labkit", description="Distributed training, learnt by running it.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    _add_train(commands)
    doctor = commands.add_parser("doctor", help="check what this machine has and can do")
    doctor.set_defaults(call=_doctor)
    _add_bench(commands)
    _add_compare(commands)
    lab = commands.add_parser("lab", help="open the course; takes JupyterLab's own options too")
    lab.set_defaults(call=_lab)
    return parser


def _add_bench(commands) -> None:
    bench = commands.add_parser("bench", help="measure labkit against PyTorch on this machine")
    add = bench.add_argument
    names = "launch, all-reduce, ddp, placement, pipeline; all of them if left out"
    add("name", nargs="*", metavar="NAME", help=names)
    ranks = "the numbers of ranks, one run each (2,4)"
    add("--world-size", dest="world_sizes", type=_wholes, metavar="N,N", help=ranks)
    sizes = "all-reduce: of the tensor, 4KiB,1MiB for example"
    add("--sizes", dest="sizes_bytes", type=_sizes, metavar="SIZE,SIZE", help=sizes)
    add("--models", type=_names, metavar="M,M", help="ddp, pipeline: resnet18, vgg16")
    add("--repeats", type=_whole, metavar="N", help="at most; slow contenders get fewer")
    add("--device", metavar="auto|cpu|cuda", help="all-reduce, ddp: where the tensors are")
    add("--json", metavar="FILE", help="record one bench's figures with the hardware")
    add("--figure", metavar="FILE.png", help="all-reduce, placement: draw the times")
    bench.set_defaults(call=_bench)


def _add_compare(commands) -> None:
    compare = commands.add_parser("compare", help="all techniques and PyTorch's, like for like")
    add = compare.add_argument
    some = "some of them; PyTorch's counterparts take part too"
    add("--strategies", type=_names, metavar="S,S", help=some)
    lists = {
        "--world-size": ("N,N", "numbers of ranks (1,2,3,4)"),
        "--train-size": ("N,N", "training samples (a quarter, a half, all)"),
        "--batch-size": ("B,B", "global batches (64,128,256)"),
    }
    for option, (metavar, text) in lists.items():
        dest = option[2:].replace("-", "_") + "s"
        add(option, dest=dest, type=_wholes, metavar=metavar, help=text)
    often = "of everything; as many as fit into 8 minutes if left out"
    add("--repeats", type=_whole, metavar="N", help=often)
    add("--epochs", type=_whole, metavar="E", help="of each run (6)")
    add("--target", type=_percent, metavar="PERCENT", help="held-out accuracy to reach (95)")
    add("--model", metavar="M")
    add("--dataset", metavar="D")
    add("--device", metavar="auto|cpu|cuda")
    add("--json", metavar="FILE", help="record all runs with the hardware")
    add("--figures", metavar="DIR", help="draw compare_*.png there")
    add("--from", metavar="FILE", dest="from_path", help="print and draw a record, run nothing")
    compare.set_defaults(call=_compare)


def _add_train(commands) -> None:
    train = commands.add_parser("train", help="train with one technique on real processes")
    add = train.add_argument
    defaults = RunConfig()
    add(
        "--strategy", required=True, metavar="S", help="the technique, ring_all_reduce for example"
    )
    add("--builtin", action="store_true", help="run PyTorch's counterpart of the technique")
    add("--backend", default=defaults.backend, metavar="|".join(BACKENDS), help="below --builtin")
    add("--transport", default=defaults.transport, metavar="auto|shared|gloo")
    add(
        "--world-size", type=_whole, metavar="N", help="number of ranks (default 1, or torchrun's)"
    )
    add("--batch-size", type=_whole, default=defaults.batch_size, metavar="B", help="global batch")
    add("--epochs", type=_whole, default=defaults.epochs, metavar="E")
    add("--model", default=defaults.model, metavar="M")
    add("--dataset", default=defaults.dataset, metavar="D")
    add("--train-size", type=_whole, metavar="N", help="use the first N training samples")
    add("--device", default=defaults.device, metavar="auto|cpu|cuda")
    add("--dtype", default=defaults.dtype, metavar="|".join(DTYPES))
    add("--seed", type=_whole, default=defaults.seed, metavar="K")
    add("--lr", type=_number, default=defaults.lr)
    add("--momentum", type=_number, default=defaults.momentum)
    add("--bucket-mb", type=_number, metavar="MB", help="ddp: gradients sent together")
    add("--accumulate", type=_whole, metavar="N", help="micro-batches an update")
    add("--amp", metavar="|".join(AMP), help="mixed precision")
    add("--compress", metavar="|".join(COMPRESSIONS), help="ring_all_reduce: of gradients")
    add("--servers", type=_whole, metavar="S", help="parameter_server: ranks that serve")
    add("--straggler", metavar="RANK:FACTOR", help="slow one rank's computing, 1:4.0 for example")
    add("--max-staleness", type=_whole, metavar="N", help="async_parameter_server: bound")
    add("--devices", metavar="D,D", help="of one process: cuda:0,cpu for example")
    add("--split-points", metavar="K,K", help="staged models: layers that begin a stage")
    add("--micro-batches", type=_whole, metavar="M", help="pipeline: of a batch")
    add("--schedule", metavar="|".join(PIPELINES), help="pipeline: order of the micro-batches")
    add(
        "--timeout", type=_number, default=24 * 3600, metavar="SECONDS", help="deadline of the run"
    )
    add("--download", action="store_true", help="fetch the data set if it is absent")
    add("--json", metavar="FILE", help="write settings, epochs, phases, bytes as one object")
    add("--save", metavar="FILE", help="write the parameters as a safetensors file")
    train.set_defaults(call=_train)


def _train(arguments: argparse.Namespace) -> int:
    from labkit import strategies
    from labkit.runtime import preload

    config = _config(arguments)
    strategies.check_name(config.strategy)
    units.check_above_zero("--timeout", arguments.timeout, units.MOST_SECONDS)
    check_outputs({"--json": arguments.json, "--save": arguments.save}, {})
    # Before torch is imported here: the two take seconds each, and go side by side.
    preload.warm_up()
    from labkit.training.train_run import train_run

    result = train_run(
        config, timeout_s=arguments.timeout, download=arguments.download, verbose=True
    )
    if not preload.under_torchrun() or os.environ["RANK"] == "0":
        _report(result, arguments)
    return 0


def _config(arguments: argparse.Namespace) -> RunConfig:
    names = {field.name for field in fields(RunConfig)}
    chosen = {name: getattr(arguments, name) for name in names}
    if chosen["world_size"] is None:
        chosen["world_size"] = units.parse_whole(os.environ.get("WORLD_SIZE", "1"))
    return RunConfig(**chosen)


def _report(result, arguments: argparse.Namespace) -> None:
    outputs = ((arguments.json, result.save_json), (arguments.save, result.save_state))
    try:
        write_each(*(partial(save, path) for path, save in outputs if path is not None))
    finally:
        _print_summary(result)


def _print_summary(result) -> None:
    phases = ", ".join(f"{kind} {s:.2f} s" for kind, s in sorted(result.phases_s.items()))
    print(f"mean seconds of a rank: {phases}")
    if result.bytes_sent is not None:
        print(f"bytes sent by rank: {result.bytes_sent}, in messages: {result.messages}")
    print(f"replicas agree: {result.replicas_agree}")
    if "note" in result.notes:
        print(result.notes["note"])


def _doctor(arguments: argparse.Namespace) -> int:
    from labkit.doctor import main as doctor

    return doctor()


def _bench(arguments: argparse.Namespace) -> int:
    names = ("world_sizes", "sizes_bytes", "models", "repeats", "device")
    check_outputs({"--json": arguments.json, "--figure": arguments.figure}, {})
    from labkit import bench

    options = {name: getattr(arguments, name) for name in names}
    outputs = arguments.json, arguments.figure
    return bench.main(arguments.name, *outputs, words=arguments.words, **options)


def _compare(arguments: argparse.Namespace) -> int:
    names = ("strategies", "world_sizes", "train_sizes", "batch_sizes", "repeats", "epochs")
    names += ("target", "model", "dataset", "device")
    check_outputs({"--json": arguments.json}, {"--from": arguments.from_path})
    from labkit.bench import compare

    options = {name: getattr(arguments, name) for name in names}
    files = arguments.json, arguments.figures, arguments.from_path
    return compare.main(*files, words=arguments.words, **options)


def _lab(arguments: argparse.Namespace) -> int:
    from labkit.lab import main as lab

    return lab(arguments.rest)


def main(argv: list[str] | None = None) -> int:
    """Parse and call. Errors of use are one line and exit 2; a run or a file that failed is 1."""
    parser = _parser()
    words = sys.argv[1:] if argv is None else argv
    arguments, arguments.rest = parser.parse_known_args(words)
    arguments.words = words
    if arguments.rest and arguments.command != "lab":
        parser.error(f"unrecognized arguments: {' '.join(arguments.rest)}")
    try:
        return arguments.call(arguments)
    except (WorkerError, OutputError) as error:
        print(f"labkit: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        print("labkit: stopped; all ranks have ended", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
