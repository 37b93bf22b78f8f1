"""The contents of other tools' files: JSON, JSON lines, text and pickles, gzipped or not.

A pickle is read as data: one that asks for a class or a function is refused, and nothing runs.
"""

import gzip
import io
import json
import pickle
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from labkit.engine.files import check_regular

# Names of traces and dumps in a folder; that of a flight recorder's file may end with its rank.
_IN_FOLDERS = re.compile(r"\.(?:json|json\.gz|jsonl|pickle|pkl|html|txt)$|^[^.]*\d$")
# A profile of 200 MB has a million events; of most, nothing or only name and times are read.
_UNUSED = {"python_function", "overhead", "ac2g", "fwdbwd", "async_cpu_to_gpu", "cuda_sync"}
_RUNTIME = re.compile(r"runtime|driver", re.IGNORECASE)
# Calls of other devices' runtimes have names of their own.
_OTHER_RUNTIME = re.compile(r"(?!cuda|hip)\w+_(?:runtime|driver)")
_COLLECTIVE = re.compile("reduce|gather|scatter|all_?to_?all|broadcast|ccl|gloo", re.IGNORECASE)
# Stands for all events in which a host started work on a GPU.
LAUNCH = {"ph": "launch", "name": "launch"}


class _DataUnpickler(pickle.Unpickler):
    """An unpickler of dicts, lists, tuples, sets, strings and numbers; ValueError for all else."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(
            f"it asks for {module}.{name}, and only plain data are read from a pickle"
        )


def list_files(paths: Sequence[str | Path]) -> list[Path]:
    """Return the files; a folder stands for those in it that can be a trace or a dump."""
    files = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        inside = [entry for entry in sorted(path.iterdir()) if _IN_FOLDERS.search(entry.name)]
        if not inside:
            raise ValueError(f"{path} has no traces or dumps (.json, .json.gz, .jsonl, .pickle)")
        # Text beside traces is a profiler's table; alone, it may be the debug server's.
        data = [entry for entry in inside if entry.suffix not in (".txt", ".html")]
        files += data or inside
    return files


def load(path: Path) -> Any:
    """Return what a file holds: parsed JSON, a list for JSON lines, a pickle's data, or text.

    Raises:
        ValueError: it is absent, cut off, not what its name says, or a pickle of more than data.
    """
    check_regular(path)
    try:
        data = path.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        if data[:1] == b"\x80":
            return _DataUnpickler(io.BytesIO(data)).load()
        text = data.decode()
        del data
        if text.lstrip()[:1] not in ("{", "["):
            return text
        if '"log_type_name"' in text.split("\n", 1)[0]:
            # The last line may be cut off: its process ended while it wrote.
            return [json.loads(line) for line in text.split("\n")[:-1] if line]
        # Names of operators have characters that JSON forbids.
        return json.loads(text, object_hook=_drop_unused, strict=False)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"cannot read {path}: its JSON is damaged or cut off ({error.msg})"
        ) from None
    except (OSError, EOFError, zlib.error, ValueError, RecursionError) as error:
        raise ValueError(f"cannot read {path}: {error}") from None
    except (pickle.UnpicklingError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"cannot read {path}: {error!r}") from None


def kind_of(path: Path, content: Any) -> str:
    """Return the kind of a file, in words; ValueError for one that cannot be judged."""
    if isinstance(content, str) and ("<pre>" in content or "=== " in content):
        return "dumps of PyTorch's debug server"
    if isinstance(content, dict) and "traceEvents" in content:
        return "traces"
    if isinstance(content, dict) and isinstance(content.get("entries"), list):
        return "flight recorder dumps"
    if isinstance(content, list) and content and isinstance(content[0], dict):
        if "log_type_name" in content[0]:
            return "torchtitan's structured logs"
        return "traces"
    raise ValueError(
        f"cannot judge {path}: it is neither a trace of labkit's or of PyTorch's profiler, nor a "
        "dump of the flight recorder or the debug server, nor a structured log of torchtitan's"
    )


def _drop_unused(item: dict[str, Any]) -> dict[str, Any] | None:
    """Keep of a Chrome event no more than is read; another JSON object stays as it is."""
    if "ph" not in item:
        return item
    category = str(item.get("cat"))
    name = str(item.get("name"))
    if category in _UNUSED:
        return None
    if _RUNTIME.search(category):
        is_launch = "Launch" in name or _OTHER_RUNTIME.match(category)
        return LAUNCH if is_launch else None
    is_ours = "num_bytes" in (item.get("args") or ())
    if item["ph"] == "X" and not is_ours and not _COLLECTIVE.search(name):
        item.pop("args", None)
    return item
