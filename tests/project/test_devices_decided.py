"""Each page says on which device it runs.

A run without a device goes to GPUs where there are any, and meets tensors that its cell made on
the CPU. (``make test-pretended`` runs the pages as with GPUs.)
"""

import re
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_one_choice_at_the_top_decides_for_the_page(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert re.search('^DEVICE = "(auto|cpu)"  # ', cells[0].source, re.MULTILINE)
    assert "labkit.warm_up(device=DEVICE" in cells[0].source
    # On a GPU server it may say that ranks share a GPU.
    assert "nbval-ignore-output" in cells[0].metadata.tags
    elsewhere = "\n".join(cell.source for cell in cells[1:])
    assert not re.findall(r'device="(?:auto|cuda\b[^"]*)"', elsewhere), "DEVICE decides"
