"""How a recorded result was taken: the command, the settings, the hardware and the versions."""

import contextlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from labkit.devices import hardware, versions
from labkit.files import write_atomically, write_each
from labkit.gpus import num_gpus

if TYPE_CHECKING:
    from workbook.plots.figure import CaptionedFigure

# {name or path: figure}. In a string, since the ranks that import this do not need matplotlib.
Figures: TypeAlias = "dict[str, CaptionedFigure]"
_DRIVER = Path("/proc/driver/nvidia/version")
_OUTPUTS = {"--json", "--figure", "--figures"}
_FLAGS = {
    "sizes_bytes": "--sizes",
    "world_sizes": "--world-size",
    "train_sizes": "--train-size",
    "batch_sizes": "--batch-size",
}


class Result:
    """What a bench yields: a text (``str``), a part of the record, and figures."""

    def record(self) -> dict[str, Any]:
        """Rows of plain numbers and texts, by name; ``merged`` joins those of several results."""
        raise NotImplementedError

    def figures(self) -> Figures:
        """The figures by name; empty for a bench that draws none."""
        return {}

    def plain(self) -> dict[str, Any]:
        """The fields that are one integer or text, which all rows of the record share."""
        return {name: value for name, value in vars(self).items() if isinstance(value, (int, str))}


def command_line(words: Sequence[str], program: str = "labkit") -> str:
    """The command line of these words, without the options that name output files."""
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
    """The hardware and the versions, on which the numbers of a record depend.

    Where there are GPUs also the versions of their driver, of CUDA and of NCCL.
    """
    found = {"hardware": hardware(), "versions": versions()}
    if num_gpus():
        found["versions"] = {**found["versions"], **_gpu_versions()}
    return found


def _gpu_versions() -> dict[str, str]:
    import torch
    import torch.distributed as dist

    found = {"cuda": torch.version.cuda or "none"}
    if dist.is_available() and dist.is_nccl_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    with contextlib.suppress(OSError):
        # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Tue Sep 23 ..."
        words = _DRIVER.read_text(encoding="utf-8").split()
        numbers = (word for word in words if re.fullmatch(r"\d+(\.\d+)+", word))
        found["driver"] = next(numbers, "unknown")
    return found


def merged(results: Iterable[Result]) -> dict[str, Any]:
    """One record of several results: lists of the same name become one list."""
    found: dict[str, Any] = {}
    for result in results:
        for name, part in result.record().items():
            found[name] = found[name] + part if name in found else part
    return found


def write(record: dict[str, Any], json_path: str | None, figures: Figures) -> None:
    """Write the record, if it has a path, and each figure, even if writing another one fails.

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
    """A record as JSON text, one line for each row of its lists."""
    lines = (f'  "{name}": {_lines(part)}' for name, part in record.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(part: Any) -> str:
    if not (isinstance(part, list) and part):
        return json.dumps(part)
    return "[\n    " + ",\n    ".join(map(json.dumps, part)) + "\n  ]"
