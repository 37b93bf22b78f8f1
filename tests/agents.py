"""torchrun's agents as separate nodes of one machine, started by the course's own scripts."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import warm_python
from elastic_work import make_dataset, make_model
from ranks import wait_until
from safetensors.torch import load_file

from labkit import train_with
from labkit.engine.comm.shared_memory import kill_marked
from labkit.training.result import largest_difference

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "notebooks" / "scripts"
WORK = ["--model", "elastic_work:make_model", "--dataset", "elastic_work:make_dataset"]
WORK += ["--dtype", "float64", "--batch-size", "10"]
NUMBERS = {"model": make_model, "dataset": make_dataset, "batch_size": 10, "dtype": "float64"}
PATIENCE_S = 90
# The variable by which an agent and its ranks are known.
MARK = "TESTS_AGENT"


class Agents:
    """Scripts that run in a folder of the test, each in a session of its own.

    Their ``python`` and ``torchrun``, and torchrun's ranks, are forks of one that has imported
    torch (``warm_python``).

    Args:
        folder: where they run.
        pace_s: how long each step takes at least, until ``hurry``.
        variables: of the environment, added to the test's own.
    """

    def __init__(self, folder: Path, pace_s: float = 0.0, **variables: str):
        self.folder, programs = folder, folder / "programs"
        programs.mkdir()
        for name, words in {"python": "", "torchrun": "-m torch.distributed.run"}.items():
            text = f'#!/bin/sh\nexec "{warm_python.command()}" {words} "$@"\n'
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        self.variables = os.environ | {
            "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": f"{ROOT}:{ROOT}/tests",
            "TMPDIR": str(folder), "OMP_NUM_THREADS": "1",
            "TESTS_FOLDER": str(folder), "TESTS_PACE_S": str(pace_s),
            **variables,
        }  # fmt: skip
        self.started: dict[str, subprocess.Popen] = {}

    def start(self, name: str, script: str, *words: str, **variables: str) -> subprocess.Popen:
        """Run ``script`` with its output in the file ``name``."""
        with open(self.folder / name, "a") as log:
            self.started[name] = subprocess.Popen(
                ["bash", str(SCRIPTS / script), *words],
                cwd=self.folder, env=self.variables | variables | {MARK: f"{self.folder}/{name}"},
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        return self.started[name]

    def told(self, name: str) -> str:
        return (self.folder / name).read_text()

    def hurry(self) -> None:
        """Let the ranks train as fast as they can."""
        (self.folder / "hurry").touch()

    def kill(self, name: str) -> None:
        """Kill an agent and its ranks at once, as when a machine loses its power."""
        agent = self.started[name]
        kill_marked(MARK, f"{self.folder}/{name}", PATIENCE_S, agent.poll)
        agent.wait()

    def wait(self, name: str) -> int:
        return self.started[name].wait(PATIENCE_S)

    def wait_until(self, condition) -> None:
        if not wait_until(condition, PATIENCE_S):
            raise AssertionError("\n".join(f"{one}: {self.told(one)}" for one in self.started))

    def rounds(self) -> list[list[int]]:
        """By start of the ranks whose first rank has begun: the processes of those that have."""
        found: list[list[int]] = []
        for rank, log in enumerate(sorted(self.folder.glob("begun-*"))):
            starts = [list(map(int, line.split())) for line in log.read_text().splitlines()]
            if rank == 0:
                sizes = [world_size for world_size, _ in starts]
                found = [[] for _ in sizes]
            larger = [one for one, world_size in zip(found, sizes) if world_size > rank]
            for processes, (_, process) in zip(larger, starts):
                processes.append(process)
        return found

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *_: object) -> None:
        for name, agent in self.started.items():
            if agent.poll() is None:
                self.kill(name)


def check_result(folder: Path, epochs: int, checkpoints: Path, world_size: int | None = None):
    """The same parameters as on one device: no sample is lost or seen twice; one whole report."""
    due = train_with("single", epochs=epochs, **NUMBERS)
    assert largest_difference(load_file(folder / "end"), due.state) < 1e-10
    report = json.loads((folder / "out.json").read_text())
    assert report["replicas_agree"]
    assert world_size in (None, report["config"]["world_size"])
    losses = [row["loss"] for row in due.epochs]
    assert [row["loss"] for row in report["epochs"]] == pytest.approx(losses, rel=1e-12)
    hidden = [path.name for path in checkpoints.iterdir() if path.name[0] == "."]
    assert hidden == []


def newest(folder: Path) -> int:
    """The number of the newest checkpoint."""
    return max((int(path.name[5:]) for path in folder.glob("step-*")), default=0)
