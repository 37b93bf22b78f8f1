"""The commands of ``labkit`` that need the course: bench, compare, progress, lab, reset.

labkit finds ``add`` by the entry point in pyproject.toml. What a command needs is imported when
it runs.
"""

from argparse import Namespace
from typing import Any

from labkit import units
from labkit.engine.files import check_writable
from labkit.units import list_of, typed

_integers = list_of(int)


def add(commands) -> None:
    """Add them to labkit's parser, each with the function that runs it."""
    _add_bench(commands)
    _add_compare(commands)
    progress = commands.add_parser("progress", help="exercises passed; predictions and reality")
    progress.set_defaults(run=_progress)
    lab = commands.add_parser("lab", help="open the course; takes JupyterLab's own options too")
    lab.set_defaults(run=_lab, takes_rest=True)
    reset = commands.add_parser("reset", help="a fresh page in my_course; yours stays beside it")
    reset.set_defaults(run=_reset)
    reset.add_argument("page", metavar="PAGE", help="its number, for example 06")


def _percent(text: str) -> float:
    try:
        return float(text.removesuffix("%")) / 100
    except ValueError:
        raise ValueError(f"takes a percentage such as 95, got {text!r}") from None


def _add_bench(commands) -> None:
    bench = commands.add_parser("bench", help="measure our all-reduces against gloo and NCCL")
    bench.set_defaults(run=_bench)
    add = bench.add_argument
    ranks = "numbers of ranks, one run each (2,4)"
    add("--world-size", dest="world_sizes", type=_integers, metavar="N,N", help=ranks)
    sizes = "tensor sizes, for example 4KiB,1MiB"
    parse_sizes = list_of(units.parse_bytes)
    add("--sizes", dest="sizes_bytes", type=parse_sizes, metavar="SIZE,SIZE", help=sizes)
    add("--repeats", type=int, metavar="N", help="turns of each (30)")
    add("--device", metavar="auto|cpu|cuda", help="where the ranks run")
    record = "record the results, and the hardware, in FILE"
    add("--json", dest="json_path", metavar="FILE", help=record)
    add("--figure", dest="figure_path", metavar="FILE.png", help="draw FILE_2_ranks.png")


def _add_compare(commands) -> None:
    compare = commands.add_parser("compare", help="all techniques and PyTorch's, like for like")
    compare.set_defaults(run=_compare)
    add = compare.add_argument
    techniques = "compare only these techniques, with PyTorch's counterparts"
    add("--strategies", type=list_of(str), metavar="S,S", help=techniques)
    ranks = "number of ranks (one per core or GPU, 4 at most)"
    add("--world-size", type=int, metavar="N", help=ranks)
    samples = "numbers of training samples (a quarter, a half, all)"
    add("--train-size", dest="train_sizes", type=_integers, metavar="N,N", help=samples)
    add("--batch-size", type=int, metavar="B", help="global batch (128)")
    add("--repeats", type=int, metavar="N", help="runs of each technique (3)")
    add("--epochs", type=int, metavar="E", help="epochs per run (6)")
    accuracy = "held-out accuracy to reach (95)"
    add("--target", type=typed(_percent), metavar="PERCENT", help=accuracy)
    add("--model", metavar="M", help="as for train")
    add("--lr", type=float, metavar="R", help="as for train")
    add("--optimizer", metavar="NAME", help="as for train")
    add("--no-builtin", dest="builtin", action="store_false", help="without PyTorch's")
    placed = "also these placements of model_parallel, such as 31 15,31,33"
    add("--split-points", nargs="+", metavar="K,K", help=placed)
    add("--dataset", metavar="D", help="as for train")
    add("--device", metavar="auto|cpu|cuda", help="as for train")
    add("--json", dest="json_path", metavar="FILE", help="record runs and hardware in FILE")


def _bench(arguments: Namespace) -> int:
    check_writable(arguments.json_path, arguments.figure_path)
    from workbook.measure.bench import main as bench

    return bench(**_given(arguments))


def _compare(arguments: Namespace) -> int:
    check_writable(arguments.json_path)
    from workbook.measure.compare.measure import main as compare

    return compare(**_given(arguments))


def _progress(arguments: Namespace) -> int:
    from workbook.notebook import progress

    print(progress.progress())
    return 0


def _given(arguments: Namespace) -> dict[str, Any]:
    """The options that were given, and the words of the command line, which are recorded."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    for name in ("command", "rest", "run", "local_rank"):
        given.pop(name, None)
    return given


def _lab(arguments: Namespace) -> int:
    from workbook.lab import main as lab

    return lab(arguments.rest)


def _reset(arguments: Namespace) -> int:
    from workbook.lab import reset_page

    fresh, old = reset_page(arguments.page)
    kept = f"; yours is now {old.name} beside it" if old else ""
    print(f"{fresh} is new{kept}")
    return 0
