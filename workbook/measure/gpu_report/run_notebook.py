"""Run a notebook and store it elsewhere: ``python -m ...gpu_report.run_notebook IN OUT``.

Every cell runs, also after one has raised, and OUT/result.json says which have.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from labkit.files import write_atomically


def main(source: str, folder: str, cell_timeout_s: float = 240.0) -> int:
    """Run the notebook ``source`` in its own folder; store it in ``folder``.

    Returns:
        1 if a cell raised that is not tagged ``raises-exception``, else 0.
    """
    import nbformat
    from nbclient import NotebookClient

    # The kernel must be that of this environment, even if the user has installed another one.
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    notebook: Any = nbformat.read(source, as_version=4)
    where: Any = {"metadata": {"path": str(Path(source).resolve().parent)}}
    settings = {"timeout": cell_timeout_s, "kernel_name": "python3", "resources": where}
    client = NotebookClient(notebook, allow_errors=True, record_timing=False, **settings)
    started_s = time.perf_counter()
    client.execute(env={**os.environ, "LABKIT_LIVE": "0"}, stderr=subprocess.DEVNULL)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    errors = [
        {"cell": number, "error": f"{output.ename}: {output.evalue}"}
        for number, cell in enumerate(notebook.cells, 1)
        if cell.cell_type == "code" and "raises-exception" not in cell.metadata.get("tags", [])
        for output in cell.outputs
        if output.output_type == "error"
    ]
    found: dict[str, Any] = {"notebook": Path(source).name, "cells": len(cells), "errors": errors}
    found["seconds"] = round(time.perf_counter() - started_s, 1)
    write_atomically(Path(folder) / Path(source).name, nbformat.writes(notebook) + "\n")
    write_atomically(Path(folder) / "result.json", json.dumps(found, indent=1) + "\n")
    for row in errors:
        print(f"cell {row['cell']}: {row['error']}", file=sys.stderr)
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
