"""All figures that a GPU server can show, as one page: ``make gpu-report``.

Each step is a command of the course, most valuable first, with a folder for its output. What is
done is kept, so that the report may be stopped and goes on when it is called again; another
version of the code, or other hardware, begins anew in another folder (``ARGS="--out FOLDER"``).
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from labkit.engine.files import write_atomically
from workbook.measure.record import machine

ROOT = Path(__file__).resolve().parents[1]
LABKIT = (sys.executable, "-m", "labkit")
ENVIRONMENT = {"LABKIT_PROGRESS": "off", "LABKIT_TEST_GPUS": "1", "PYTHONUNBUFFERED": "1"}
GRACE_S = 15.0


def steps(gpus: int) -> dict[str, tuple[float, list[str]]]:
    """Name -> (the seconds that it may take, its command); ``{}`` stands for its folder."""
    most = min(max(2, gpus), 8)
    ranks = ",".join(map(str, sorted({2, most})))
    tests = [sys.executable, "-m", "pytest", "tests/gpu", "-p", "no:nbval", "-k", "not notebook"]

    bench = [*LABKIT, "bench", "--device", "cuda", "--world-size", ranks]
    bench += ["--json", "{}/result.json", "--figure", "{}/time.png"]
    found = {
        "doctor": (120, [*LABKIT, "doctor"]),
        "all-reduce": (210, bench),
        "tests": (420, [*tests, "-q"]),
        "compare": (240, [*LABKIT, "compare", "--device", "cuda", "--repeats", "1"]),
    }
    found["compare"][1].extend(["--json", "{}/result.json"])
    execute = ["nbconvert", "--to", "html", "--execute", "--output-dir", "{}"]
    for path in sorted(ROOT.glob("notebooks/*.ipynb")):
        found[path.stem] = (200, [sys.executable, "-m", "jupyter", *execute, str(path)])
    return found


def run(folder: Path, words: list[str], limit_s: float) -> str:
    """Run a step; returns how it ended. What it prints goes to its log."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [word.replace("{}", str(folder)) for word in words]
    env, quiet = os.environ | ENVIRONMENT, {"stdin": subprocess.DEVNULL}
    with (folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, **quiet
        )
    try:
        code = process.wait(limit_s)
        return "done" if code == 0 else f"failed with exit code {code}"
    except subprocess.TimeoutExpired:
        return f"stopped after its {limit_s:.0f} s"
    finally:
        # Its own processes end as with Ctrl-C.
        process.send_signal(signal.SIGINT)
        try:
            process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()


def page(out: Path, states: dict[str, str]) -> str:
    """The report as Markdown: how each step ended, what it printed, its figures."""
    parts = ["# GPU report", "```", json.dumps(machine(), indent=2), "```"]
    for name, state in states.items():
        parts += [f"## {name}: {state}", ""]
        parts += [f"![{p.stem}]({name}/{p.name})" for p in sorted((out / name).glob("*.png"))]
        parts += [f"[{p.name}]({name}/{p.name})" for p in sorted((out / name).glob("*.html"))]
        log = out / name / "log.txt"
        text = log.read_text(errors="replace") if log.is_file() else "not reached"
        parts += ["```", text.strip()[-20_000:], "```"]
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description="All figures that a GPU server can show, as one page."
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-report"))
    parser.add_argument("--minutes", type=float, default=30.0, help="for everything")
    parser.add_argument("--steps", help="only these, by name, separated by commas")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this machine has no GPU that can be used: labkit doctor says what is there")
    deadline_s, out = time.monotonic() + 60 * given.minutes, given.out.resolve()
    states_file = out / "states.json"
    states = json.loads(states_file.read_text()) if states_file.is_file() else {}
    for name, (budget_s, words) in steps(torch.cuda.device_count()).items():
        left_s = deadline_s - time.monotonic()
        wanted = given.steps is None or name in given.steps.split(",")
        if not wanted or left_s < GRACE_S or states.get(name) == "done":
            continue
        print(f"{name} ...", end=" ", flush=True)
        states[name] = run(out / name, words, min(budget_s, left_s))
        print(states[name], flush=True)
        write_atomically(states_file, json.dumps(states, indent=2))
        write_atomically(out / "report.md", page(out, states))
    print(f"the page: {out / 'report.md'}")
    return int(any(state != "done" for state in states.values()))


if __name__ == "__main__":
    sys.exit(main())
