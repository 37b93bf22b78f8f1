"""What the texts say of records, pages and settings is what these hold."""

import ast
import json
import re
import shlex
import statistics
from collections import defaultdict
from pathlib import Path

import pytest

from labkit import run
from labkit.__main__ import config_of, make_parser
from labkit.engine import devices
from labkit.training.resolve import make_strategy
from labkit.units import format_bytes
from labkit.workload.models import MODELS

ROOT = Path(__file__).resolve().parents[2]
TEXT = "\n".join(
    (ROOT / name).read_text() for name in ("README.md", "docs/command_line.md", "docs/hardware.md")
)
# Without line breaks: a sentence may go over several.
README = " ".join(TEXT.split())
COMMANDS = [
    line.partition("#")[0]
    for block in re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if "-m labkit train" in line and "mpirun" not in line
]


def test_the_all_reduce_beside_gloo_and_mpi():
    # By size, by contender, the seconds of all repeats.
    times = defaultdict(dict)
    for row in json.loads((ROOT / "data/results/all_reduce.json").read_text())["rows"]:
        if row["world_size"] == 2:
            times[row["size_bytes"]][row["contender"]] = row["seconds"]
    medians = {
        size: {name: statistics.median(seconds) for name, seconds in by.items()}
        for size, by in times.items()
    }
    # gloo's fast runs and its slow ones differ by a factor of ten: against the fast ones.
    ratios = {
        size: statistics.quantiles(by["gloo"], method="inclusive")[0] / medians[size]["fast"]
        for size, by in times.items()
    }
    least, most = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
    assert ratios[least] > 1
    said = f"from {ratios[least]:.2g} times at {format_bytes(least)} to "
    said += f"{ratios[most]:.2g} times at {format_bytes(most)}"
    assert f"ours is ahead of the faster quarter of gloo's runs at every size, {said};" in README
    ahead = [size for size, by in medians.items() if by["MPI"] < min(by["fast"], by["gloo"])]
    assert ahead == sorted(times)[: len(ahead)]
    assert f"MPI is ahead of both up to {format_bytes(max(ahead))}." in README


@pytest.mark.parametrize("command", COMMANDS)
def test_every_training_command_is_one_that_runs(command, monkeypatch):
    words = shlex.split(command)
    if words[0] == "torchrun":
        set_by_torchrun = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
        set_by_torchrun["WORLD_SIZE"] = words[words.index("--nproc-per-node") + 1]
        for name, value in set_by_torchrun.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(devices, "num_gpus", lambda: 4 if "cuda:" in command else 0)
    config = config_of(make_parser().parse_args(words[words.index("train") :]))
    assert config.model in MODELS
    make_strategy(config)
    if config.split_points:
        assert config.world_size == 3, "# three stages"


def test_the_example_gives_what_its_comment_says():
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "around" in b)
    names = {"__name__": "example"}
    exec(compile(block, "README.md", "exec"), names)
    said = ast.literal_eval(re.search(r"world_size=4\).values\)  # (.*)", block)[1])
    assert run(names["around"], world_size=4).values == said


@pytest.mark.parametrize(
    "path",
    ["README.md", "labkit/workload/data/README.md"]
    + [f"docs/{name}.md" for name in ("clients", "command_line", "hardware")],
)
def test_links_lead_to_files_that_are_there(path):
    links = re.findall(r"\]\(([^)#\s]+)\)", (ROOT / path).read_text())
    for link in links:
        assert "://" in link or ((ROOT / path).parent / link).exists(), link
