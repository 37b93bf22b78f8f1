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

from labkit.engine.files import write_atomically

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
KERNEL = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
NOISE = ("execution", "ExecuteTime", "trusted", "collapsed", "scrolled")
CELL_TIMEOUT_S = 300


def main(argv: list[str] | None = None) -> int:
    """Execute each file in turn; return the number of notebooks that were not stored."""
    parser = argparse.ArgumentParser(description="Run notebooks and store their outputs in place.")
    parser.add_argument("notebooks", nargs="*", type=Path, metavar="FILE")
    tidy_only = "run nothing; only remove the noise from these files"
    parser.add_argument("--tidy", action="store_true", help=tidy_only)
    given = parser.parse_args(argv)
    # The kernel must be that of this environment, even if the user has installed another one.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    # A page's kernel is a fork of the process that the first one has started.
    os.environ["JUPYTER_DEFAULT_PROVISIONER_NAME"] = "labkit-warm"
    failed = 0
    for path in given.notebooks:
        start_s = time.perf_counter()
        try:
            store(path, execute=not given.tidy)
            print(f"{path}: stored after {time.perf_counter() - start_s:.1f} s")
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            print(f"{path}: not stored\n{error}", file=sys.stderr)
            failed += 1
    return failed


def store(path: Path, execute: bool = True) -> None:
    """Run the notebook in its own folder and write it back with its outputs, without noise.

    Raises:
        CellExecutionError, CellTimeoutError, DeadKernelError: the file is not changed.
    """
    notebook = nbformat.read(path, as_version=4)
    if execute:
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT_S,
            kernel_name=KERNEL["name"],
            resources={"metadata": {"path": str(path.resolve().parent)}},
            record_timing=False,
        )
        # Live output depends on time; without it the text is the same each time, as in make test.
        # What the kernel prints as it starts does not belong to the notebook; its death raises.
        client.execute(env=os.environ | {"LABKIT_LIVE": "0"}, stderr=subprocess.DEVNULL)
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
        # From the content, not the position, so that a new cell does not change others' ids.
        text = f"{cell.cell_type}\n{cell.source}"
        digest = hashlib.sha256(text.encode()).hexdigest()[:10]
        seen[digest] += 1
        cell["id"] = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
        for key in NOISE:
            cell.metadata.pop(key, None)
        for output in cell.get("outputs", []):
            # Without its widget, a stored view shows as an error; the text beside it is readable.
            output.get("data", {}).pop(WIDGET_VIEW, None)


if __name__ == "__main__":
    sys.exit(main())
