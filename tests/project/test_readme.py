"""What the texts say of records, pages and settings is what these hold."""

import ast
import json
import re
import shlex
import statistics
import tomllib
from pathlib import Path

import pytest

from labkit import devices, run
from labkit.__main__ import config_of, main, make_parser
from labkit.training.resolve import make_strategy
from labkit.units import format_bytes
from labkit.workload.datasets import load_dataset
from labkit.workload.models import MODELS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "data" / "results"
TEXT = "\n".join(
    (ROOT / name).read_text() for name in ("README.md", "docs/command_line.md", "docs/hardware.md")
)
# Without line breaks: a sentence may go over several.
README = " ".join(TEXT.split())
COMMANDS = [
    line.partition("#")[0]
    for block in re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
    for line in block.replace("\\\n", " ").splitlines()
    if "-m labkit train" in line
]


def record(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def all_reduce_times(world_size):
    """By size, by contender: the median, as the figure draws it."""
    found = {}
    for row in record("all_reduce")["rows"]:
        if row["world_size"] == world_size:
            times = found.setdefault(row["size_bytes"], {})
            times[row["contender"]] = statistics.median(row["seconds"])
    return found


def test_the_ring_beside_gloo_and_mpi():
    times = all_reduce_times(2)
    ratios = {size: by["gloo"] / by["fast ring"] for size, by in times.items()}
    least, most = min(ratios, key=ratios.get), max(ratios, key=ratios.get)
    assert ratios[least] > 1
    said = f"from {ratios[least]:.2g} times at {format_bytes(least)} to "
    said += f"{ratios[most]:.2g} times at {format_bytes(most)}"
    assert f"the fast ring is ahead of gloo at every size, {said};" in README
    ahead = [size for size, by in times.items() if by["MPI"] < min(by["fast ring"], by["gloo"])]
    assert ahead == sorted(times)[: len(ahead)]
    assert f"MPI is ahead of both up to {format_bytes(max(ahead))}." in README


def test_the_machine_of_the_records():
    numbers = {1: "one", 2: "two", 4: "four", 8: "eight"}
    cores = numbers[record("all_reduce")["hardware"]["cores"]]
    assert (
        f"is from one machine with {cores} cores, named in [../data/results/all_reduce" in README
    )
    machines = [json.loads(path.read_text())["hardware"] for path in RESULTS.glob("*.json")]
    assert not any(machine["gpus"] for machine in machines)
    assert "So far the course has been run on CPU machines only." in README


def test_the_oldest_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = (one for one in project["dependencies"] if re.match(r"torch\W", one))
    assert f"PyTorch {torch.partition('>=')[2]} or newer." in README
    assert f"Python {project['requires-python'].removeprefix('>=')} or newer" in README


@pytest.mark.parametrize("command", COMMANDS)
def test_every_training_command_is_one_that_runs(command, monkeypatch):
    words = shlex.split(command)
    if words[0] == "torchrun":
        monkeypatch.setenv("WORLD_SIZE", words[words.index("--nproc-per-node") + 1])
    monkeypatch.setattr(devices, "num_gpus", lambda: 4 if "cuda:" in command else 0)
    config = config_of(make_parser().parse_args(words[words.index("train") :]))
    assert config.model in MODELS
    make_strategy(config)
    if config.split_points:
        assert config.world_size == 3, "# three stages"


def test_the_recipe_runs_in_one_command(tmp_path, monkeypatch):
    """On 140 samples: two epochs of two batches."""
    (command,) = (one for one in COMMANDS if "--lr-schedule cosine" in one)
    monkeypatch.chdir(tmp_path)
    words = [*shlex.split(command)[3:], "--train-size", "140", "--json", "out.json"]
    assert main([*words, "--epochs", "2"]) == 0
    found = json.loads(Path("out.json").read_text())
    assert len(found["epochs"]) == 2
    assert found["replicas_agree"]
    folders = {name: Path(words[words.index(name) + 1]) for name in words if name[-4:] == "-dir"}
    checkpoints = sorted(folders["--checkpoint-dir"].glob("step-*"))
    assert [path.name for path in checkpoints] == ["step-00000002", "step-00000004"]
    assert list(folders["--log-dir"].glob("events.out.tfevents.*"))


def test_the_example_gives_what_its_comment_says():
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if "around" in b)
    names = {"__name__": "example"}
    exec(compile(block, "README.md", "exec"), names)
    said = ast.literal_eval(re.search(r"world_size=4\).values\)  # (.*)", block)[1])
    assert run(names["around"], world_size=4).values == said


@pytest.mark.parametrize(
    "path", ["README.md", "data/README.md", "docs/command_line.md", "docs/hardware.md"]
)
def test_links_lead_to_files_that_are_there(path):
    links = re.findall(r"\]\(([^)#\s]+)\)", (ROOT / path).read_text())
    for link in links:
        assert "://" in link or ((ROOT / path).parent / link).exists(), link


def test_the_digits_as_described():
    text = " ".join((ROOT / "data" / "README.md").read_text().split())
    digits = load_dataset("digits")
    train, test = len(digits.train_targets), len(digits.test_targets)
    assert f"holds {train + test:,} handwritten digits" in text
    assert f"| {train:,} x 8 x 8 |" in text
    per_class = digits.test_targets.bincount().tolist()
    assert len(set(per_class)) == 1
    assert f"the test set: {test} samples, {per_class[0]} of each class" in text
