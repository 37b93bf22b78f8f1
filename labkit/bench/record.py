"""How a recorded result was taken: the command, the settings, the hardware and the versions."""

import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias

from labkit.devices import hardware, versions
from labkit.files import write_atomically, write_each

if TYPE_CHECKING:
    from labkit.plots.figure import CaptionedFigure

# By name or path. In a string: every rank of a bench imports this, and does without matplotlib.
Figures: TypeAlias = "dict[str, CaptionedFigure]"
_OUTPUTS = {"--json", "--figure", "--figures"}
_FLAGS = {
    "sizes_bytes": "--sizes",
    "world_sizes": "--world-size",
    "train_sizes": "--train-size",
    "batch_sizes": "--batch-size",
}


class Result:
    """What a bench yields: printed by ``str``, and part of the record and of the figures."""

    def record(self) -> dict[str, Any]:
        """By name, rows of plain numbers and texts; ``merged`` joins those of several results."""
        raise NotImplementedError

    def figures(self) -> Figures:
        """By name; none unless a bench draws."""
        return {}

    def plain(self) -> dict[str, Any]:
        """The fields that are one number or text: what all rows of its record share."""
        return {name: value for name, value in vars(self).items() if isinstance(value, (int, str))}


def command_line(words: Sequence[str], program: str = "labkit") -> str:
    """The command of these words, without the files that it writes."""
    kept = [
        word
        for before, word in pairwise(["", *words])
        if before not in _OUTPUTS and word.partition("=")[0] not in _OUTPUTS
    ]
    return " ".join([program, *kept])


def flag(setting: str) -> str:
    """The command line's option for a bench's argument."""
    return _FLAGS.get(setting, f"--{setting}")


def machine() -> dict[str, Any]:
    """What the numbers of a record depend on: hardware and versions."""
    return {"hardware": hardware(), "versions": versions()}


def merged(results: Iterable[Result]) -> dict[str, Any]:
    """One record of several results: lists of the same name become one list."""
    found: dict[str, Any] = {}
    for result in results:
        for name, part in result.record().items():
            found[name] = found[name] + part if name in found else part
    return found


def write(record: dict[str, Any], json_path: str | None, figures: Figures) -> None:
    """Write the record, if it has a path, and each figure to its own, even if another one fails.

    Raises:
        OutputError: one or more have failed; the message names all of them.
    """
    writes: list[Callable[[], object]] = []
    if json_path is not None:
        writes.append(partial(write_atomically, json_path, dumped(record)))
    writes += [partial(_save, figure, path) for path, figure in figures.items()]
    write_each(*writes)


def _save(figure: "CaptionedFigure", path: str) -> None:
    print(f"figure: {figure.save(path)}")


def dumped(record: dict[str, Any]) -> str:
    """A record as JSON, one line for each row of its lists."""
    lines = (f'  "{name}": {_lines(part)}' for name, part in record.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(part: Any) -> str:
    if not (isinstance(part, list) and part):
        return json.dumps(part)
    return "[\n    " + ",\n    ".join(map(json.dumps, part)) + "\n  ]"
