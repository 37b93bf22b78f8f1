"""Other people's programs on our backend: the same numbers as with gloo, on 2 and 3 ranks.

docs/clients.md has a row for each. PyTorch's own run in .venv, the others where ``make clients``
has installed them.
"""

import ast
import os
import subprocess
from pathlib import Path

import pytest
import warm_python

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VENV = ROOT / ".venv-clients"


def clients_in(module):
    """Return the functions of a module that take a backend."""
    tree = ast.parse((HERE / f"{module}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if [a.arg for a in f.args.args] == ["backend"]]


MODULES = ("torch_clients", "package_clients")
CASES = [(module, name) for module in MODULES for name in clients_in(module)]


@pytest.mark.more
@pytest.mark.parametrize(("module", "name"), CASES)
def test_a_client_gets_the_numbers_that_it_gets_from_gloo(module, name):
    env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    python = warm_python.command()
    if module == "package_clients":
        # An installation that was cut off leaves a Python, but no stamp.
        if not (VENV / ".ready").exists():
            pytest.skip(f"{name} needs a separate environment: make clients")
        python = VENV / "bin" / "python"
        # What other people's packages warn of is no fault of ours.
        env["PYTHONWARNINGS"] = "ignore"
    words = [python, HERE / "start_client.py", module, name]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]


def test_every_client_has_its_row_in_the_docs():
    rows = (ROOT / "docs" / "clients.md").read_text()
    for _, name in CASES:
        assert f"| `{name}` |" in rows, name
    assert len(CASES) >= 24


def test_the_clients_get_the_pytorch_that_the_course_gets():
    pins = [(ROOT / name).read_text() for name in ("requirements.txt", "tools/clients.txt")]
    versions = [line for text in pins for line in text.splitlines() if line.startswith("torch==")]
    assert len(set(versions)) == 1
