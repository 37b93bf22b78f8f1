"""Run notebooks and store their outputs in place: python tools/execute_notebooks.py FILE ...

A notebook is stored only if every cell ran (a cell tagged ``raises-exception`` may raise). Parts
that differ from run to run without a meaning are left out, so that a stored notebook changes only
where its text, its code or its results did.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

from labkit.files import write_atomically

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
NOISE = ("execution", "ExecuteTime", "trusted", "collapsed", "scrolled")


def main(argv: list[str] | None = None) -> int:
    """Execute each file in turn; return the number of notebooks that were not stored."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--cell-timeout", type=float, default=300.0, metavar="SECONDS")
    parser.add_argument(
        "--tidy", action="store_true", help="run nothing; only remove the noise from these files"
    )
    options = parser.parse_args(argv)
    if options.tidy:
        for path in options.notebooks:
            write(path, nbformat.read(path, as_version=4))
        return 0
    # The kernel must be that of this environment, even if the user has installed another one.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    failed = [path for path in options.notebooks if not _report(path, options.cell_timeout)]
    return len(failed)


def _report(path: Path, cell_timeout_s: float) -> bool:
    start_s = time.perf_counter()
    try:
        store(path, cell_timeout_s)
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
        print(f"{path}: not stored\n{error}", file=sys.stderr)
        return False
    print(f"{path}: stored after {time.perf_counter() - start_s:.1f} s")
    return True


def store(path: Path, cell_timeout_s: float = 300.0) -> None:
    """Run the notebook in its own folder and write it back with its outputs.

    Raises:
        CellExecutionError, CellTimeoutError, DeadKernelError: the file is not changed.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=cell_timeout_s,
        kernel_name=KERNEL["name"],
        resources={"metadata": {"path": str(path.resolve().parent)}},
        record_timing=False,
    )
    # Live output depends on time; without it the text is the same each time, as in make test.
    environment = {**os.environ, "LABKIT_LIVE": "0"}
    # What the kernel prints as it starts does not belong to the notebook; its death still raises.
    client.execute(env=environment, stderr=subprocess.DEVNULL)
    write(path, notebook)


def write(path: Path, notebook: nbformat.NotebookNode) -> None:
    """Write a notebook without its noise, so that the same content gives the same bytes."""
    tidy(notebook)
    write_atomically(path, nbformat.writes(notebook).rstrip("\n") + "\n")


def tidy(notebook: nbformat.NotebookNode) -> None:
    """Remove everything that may differ between runs with the same results."""
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata.pop("widgets", None)
    notebook.metadata["kernelspec"] = dict(KERNEL)
    language = notebook.metadata.get("language_info", {})
    language.pop("version", None)
    language.pop("codemirror_mode", None)
    seen = Counter()
    for cell in notebook.cells:
        cell["id"] = _cell_id(cell, seen)
        for key in NOISE:
            cell.metadata.pop(key, None)
        for output in cell.get("outputs", []):
            # Without its widget, a stored view shows as an error; the text beside it is readable.
            output.get("data", {}).pop(WIDGET_VIEW, None)


def _cell_id(cell: nbformat.NotebookNode, seen: Counter) -> str:
    # From the content, not the position, so that a new cell does not change the ids of others.
    digest = hashlib.sha256(f"{cell.cell_type}\n{cell.source}".encode()).hexdigest()[:10]
    seen[digest] += 1
    return digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"


if __name__ == "__main__":
    sys.exit(main())
