"""torchrun's agents as separate nodes of one machine, started by the course's own scripts."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from ranks import session_of, wait_until

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "notebooks" / "scripts"
WORK = ["--model", "elastic_work:make_model", "--dataset", "elastic_work:make_dataset"]
WORK += ["--dtype", "float64", "--batch-size", "10", "--momentum", "0.9"]
PATIENCE_S = 90


class Agents:
    """Scripts that run in a folder of the test, each in a session of its own.

    Args:
        folder: where they run.
        pace_s: how long each step takes at least, until ``hurry``.
        variables: of the environment, added to the test's own.
    """

    def __init__(self, folder: Path, pace_s: float = 0.0, **variables: str):
        self.folder, self.steps_folder = folder, folder / "steps"
        self.steps_folder.mkdir()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        python_path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        self.variables = os.environ | {
            "PATH": path, "PYTHONPATH": python_path, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1",
            "LABKIT_STEPS": str(self.steps_folder), "LABKIT_PACE_S": str(pace_s), **variables,
        }  # fmt: skip
        self.started: dict[str, subprocess.Popen] = {}

    def start(self, name: str, script: str, *words: str, **variables: str) -> subprocess.Popen:
        """Run ``script`` with its output in the file ``name``."""
        with open(self.folder / name, "a") as log:
            self.started[name] = subprocess.Popen(
                ["bash", str(SCRIPTS / script), *words],
                cwd=self.folder, env=self.variables | variables,
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
        for pid in {agent.pid, *session_of(agent.pid), *children_of(agent.pid)}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def wait(self, name: str) -> int:
        return self.started[name].wait(PATIENCE_S)

    def wait_until(self, condition) -> None:
        if not wait_until(condition, PATIENCE_S):
            raise AssertionError("\n".join(f"{one}: {self.told(one)}" for one in self.started))

    def steps(self) -> dict[int, list[list[int]]]:
        """By process of a rank, the samples of each of its steps so far."""
        return {
            int(path.name): [list(map(int, line.split())) for line in path.open()]
            for path in self.steps_folder.iterdir()
        }

    def __enter__(self) -> "Agents":
        return self

    def __exit__(self, *_: object) -> None:
        for name, agent in self.started.items():
            if agent.poll() is None:
                self.kill(name)


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]
