#!/usr/bin/env bash
# marimo 0.25.2, Python 3.11 or later: `marimo export html` runs a notebook's cells in a child process
# of multiprocessing (start method spawn), `python notebook.py` in the main process.
#
# So in an export multiprocessing.parent_process() is not None: a library that takes this for "I am a
# worker of my own" refuses to work there, or works in another way than in the editor's kernel.
#
# Seen: cells run in SpawnProcess-1, daemon False
#       as a script they run in MainProcess, daemon False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet marimo==0.25.2
cat > "$folder/notebook.py" <<'NOTEBOOK'
import marimo

app = marimo.App()


@app.cell
def _():
    import multiprocessing
    import sys

    process = multiprocessing.current_process()
    sys.stderr.write(f"cells run in {process.name}, daemon {process.daemon}\n")
    return


if __name__ == "__main__":
    app.run()
NOTEBOOK
cd "$folder"
export HOME=$folder
said=$(venv/bin/python -m marimo export html notebook.py -o out.html 2>&1)
echo "$said" | grep "cells run in SpawnProcess-1, daemon False"
said=$(venv/bin/python notebook.py 2>&1)
echo "$said" | grep "cells run in MainProcess"
