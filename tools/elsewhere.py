"""Train the same with labkit, PyTorch, Horovod and TensorFlow, and record it: ``make elsewhere``.

In each round every contender that is here trains once. The experiment is a file: the digits, and
the weights of the course's ``small_cnn``. The scripts are in notebooks/scripts/elsewhere.
"""

import argparse
import json
import math
import os
import re
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from environments import FRAMEWORKS, REPOSITORY, environment_of, why_not

from labkit.engine.comm.shared_memory import kill_marked, loopback
from labkit.engine.files import check_writable
from labkit.units import check_choice
from labkit.workload.datasets import load_dataset
from labkit.workload.models import build_model
from labkit.workload.samples import epoch_order
from workbook.measure.elsewhere import elsewhere_table
from workbook.measure.record import Spread, machine, write
from workbook.measure.turns import in_turn

ONE_DEVICE = "one device"
SCRIPTS = REPOSITORY / "notebooks" / "scripts" / "elsewhere"
BATCH_SIZE = 64
# The last one is made of Horovod's: another package is imported.
OWN, HOROVOD_SCRIPT, OUR_SCRIPT = "labkit_digits.py", "horovod_digits.py", "on_our_ring.py"
# Who trains for longer than this hangs: the slowest takes some seconds to start.
LIMIT_S, KILLED_S = 120.0, 10.0
MOST_WARM_UP, MARK = 5, "LABKIT_BENCH"
# Of a script: a core for each worker, loopback, no GPU, and this labkit where it is imported.
ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1") | {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "-1",
    "GLOO_SOCKET_IFNAME": loopback(),
    "PYTHONPATH": str(REPOSITORY),
    "PYTHONHOME": "",
}

# What a script reports: see ``report`` in notebooks/scripts/elsewhere/experiment.py.
Turn = dict[str, Any]


class Contender(NamedTuple):
    launch: Callable[[Path], Sequence[str]]  # a private folder -> the words before the script
    script: str
    framework: str
    messages: str  # how they travel
    formula: str = ""  # of the bytes that a process sends per step: see ``formula_bytes``
    arguments: str = ""


def prepare(folder: Path, steps: int) -> None:
    """Put the experiment, of ``steps`` whole batches, and copies of all scripts into a folder."""
    for path in SCRIPTS.glob("*.py"):
        shutil.copy(path, folder)
    text = (folder / HOROVOD_SCRIPT).read_text(encoding="utf-8")
    ours = text.replace("import horovod.torch as hvd", "import labkit.horovod as hvd")
    (folder / OUR_SCRIPT).write_text(ours, encoding="utf-8")
    data, state = load_dataset("digits"), initial_model().state_dict()
    # An epoch's last batch, which is smaller, is left out.
    count = len(data.train_targets)
    whole = count // BATCH_SIZE * BATCH_SIZE
    epochs = range(math.ceil(steps * BATCH_SIZE / whole))
    order = torch.cat([epoch_order(count, epoch=epoch, seed=0)[:whole] for epoch in epochs])
    chosen = order.view(-1, BATCH_SIZE)[:steps]
    np.savez(
        folder / "experiment.npz",
        images=data.train_inputs[chosen].numpy(),
        labels=data.train_targets[chosen].numpy(),
        lr=0.05,
        momentum=0.9,
        **{f"weight/{name}": value.numpy() for name, value in state.items()},
    )


def initial_model() -> torch.nn.Sequential:
    return build_model("small_cnn", num_classes=10, input_shape=(1, 8, 8), seed=0)


def take_turn(contender: Contender, folder: Path) -> Turn:
    """Run a script to its end, and read what its processes report.

    However this ends, by Ctrl-C as well, no process that it has started remains, whatever its
    session: all of them carry a mark in their environment.
    """
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as name:
        own, mark = Path(name), secrets.token_hex(8)
        words = [*contender.launch(own), f"{folder / contender.script}"]
        words += [*contender.arguments.split(), "--experiment", f"{folder}/experiment.npz"]
        words += ["--report", f"{own}/report.json"]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        pipes |= {"cwd": own, "env": os.environ | ENVIRONMENT | {MARK: mark, "TMPDIR": name}}
        with (own / "log").open("wb") as log:
            process = subprocess.Popen(words, stdout=log, start_new_session=True, **pipes)
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"not done after {LIMIT_S:g} s, and so ended") from None
        finally:
            kill_marked(MARK, mark, KILLED_S, process.poll)
            process.wait()
        if code:
            log = (own / "log").read_text(encoding="utf-8", errors="replace")
            lines = [line.strip() for line in log.splitlines() if line.strip()]
            # The first error is the cause of others.
            errors = [line for line in lines if re.search(r"Error(: |$)", line)]
            why = [*errors[:1], *lines[-1:], "without a word"][0]
            raise RuntimeError(f"ended with {code}: {why}")
        reports = [json.loads(path.read_text()) for path in sorted(own.glob("report.json*"))]
    sent_bytes = {name: each for one in reports for name, each in one["sent_bytes"].items()}
    return reports[0] | {"sent_bytes": sent_bytes}


def python(folder: Path) -> list[str]:
    return [sys.executable]


def torchrun(folder: Path) -> list[str]:
    """Workers on this machine, whose agent unpickles only a file of the private folder."""
    options = "--nnodes 1 --nproc-per-node 2 --local-addr 127.0.0.1 --rdzv-id elsewhere "
    options += "--rdzv-backend c10d --rdzv-conf store_type=file --rdzv-endpoint"
    return [sys.executable, "-m", "torch.distributed.run", *options.split(), f"{folder}/store"]


def horovodrun(folder: Path) -> list[str]:
    own = environment_of("horovod") / "bin"
    # Its cache would be a folder in the user's home.
    options = ["--gloo", "-np", "2", "--disable-cache", "--network-interfaces", loopback()]
    return [str(own / "horovodrun"), *options, str(own / "python")]


def tensorflow(folder: Path) -> list[str]:
    return [str(environment_of("tensorflow") / "bin" / "python")]


TF, SUM = "TensorFlow", "all-reduce"
CONTENDERS = {
    ONE_DEVICE: Contender(python, OWN, "labkit", "none", "", "single 1"),
    "labkit ddp over TCP": Contender(python, OWN, "labkit", "TCP", SUM, "ddp 2"),
    "labkit ring_all_reduce over TCP": Contender(
        python, OWN, "labkit", "TCP", SUM, "ring_all_reduce 2"
    ),
    "labkit parameter_server over TCP": Contender(
        python, OWN, "labkit", "TCP", "server", "parameter_server 3"
    ),
    "PyTorch DDP": Contender(torchrun, "ddp_digits.py", "PyTorch", "TCP", SUM),
    "labkit.horovod": Contender(torchrun, OUR_SCRIPT, "labkit", "shared memory", SUM),
    "Horovod": Contender(horovodrun, HOROVOD_SCRIPT, "Horovod", "TCP", SUM),
    "MirroredStrategy": Contender(tensorflow, "mirrored.py", TF, "none"),
    "MultiWorkerMirroredStrategy": Contender(tensorflow, "multi_worker.py", TF, "TCP", SUM),
    "ParameterServerStrategy": Contender(tensorflow, "parameter_server.py", TF, "TCP", "server"),
}


def run_elsewhere(contenders: Sequence[str], steps: int, repeats: int) -> dict[str, Any]:
    """Train with these contenders, one device first; the record of losses, bytes and seconds.

    A contender that fails is out of the later rounds, and its row says why.
    """
    for name in contenders:
        check_choice("contender", name, CONTENDERS)
    chosen = {name: one for name, one in CONTENDERS.items() if name in (ONE_DEVICE, *contenders)}
    found: dict[str, list[Turn]] = {name: [] for name in chosen}
    needs = {name: one.framework.lower() for name, one in chosen.items()}
    asked = {name: why_not(need) for name, need in needs.items() if need in FRAMEWORKS}
    problems = {name: reason for name, reason in asked.items() if reason}
    # A short path: sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="lk-", ignore_cleanup_errors=True) as private:
        prepare(Path(private), steps)
        for repeat in range(repeats):
            for name in in_turn([name for name in found if name not in problems], repeat):
                print(f"round {repeat + 1} of {repeats}: {name}", flush=True)
                try:
                    found[name].append(take_turn(chosen[name], Path(private)))
                except RuntimeError as error:
                    problems[name] = str(error)
    truth = found[ONE_DEVICE][0]["losses"] if found[ONE_DEVICE] else None
    rows = []
    for name, one in chosen.items():
        row = {"contender": name, "framework": one.framework, "messages": one.messages}
        row |= {"problem": problems.get(name, "")}
        rows.append(row | (numbers(one, found[name], truth) if truth and found[name] else {}))
    return {"batch_size": BATCH_SIZE, "contenders": rows}


def numbers(contender: Contender, taken: list[Turn], truth: list[float]) -> dict[str, Any]:
    """A contender's measurements; bytes are those of a process per step, means over all turns."""
    # In the first steps frameworks compile, and buffers are made.
    warm_up = min(MOST_WARM_UP, len(truth) // 2)
    apart = [abs(a - b) for turn in taken for a, b in zip(turn["losses"], truth, strict=True)]
    # Not max alone: it overlooks a NaN.
    known = all(map(math.isfinite, apart))
    sent = {
        process: [one for turn in taken for one in turn["sent_bytes"][process][warm_up:]]
        for process in taken[0]["sent_bytes"]
    }
    # TensorFlow's kernels round in another way.
    tolerance = 1e-4 if contender.framework == TF else 1e-5
    return {
        "losses": taken[0]["losses"],
        "tolerance": tolerance,
        "difference": max(apart) if known else None,
        "agrees": known and max(apart) <= tolerance,
        "sent_bytes": {process: statistics.fmean(each) for process, each in sent.items()},
        "formula_bytes": formula_bytes(contender.formula),
        "step_s": asdict(Spread.of(s for turn in taken for s in turn["step_s"][warm_up:])),
        "versions": taken[0]["versions"],
    }


def formula_bytes(formula: str) -> dict[str, int]:
    """Sent per step by role, of gradients of S bytes: 2 (P - 1) / P S, or to a server and back."""
    size = 4 * sum(p.numel() for p in initial_model().parameters())
    by_role = {SUM: {"worker": size}, "server": {"worker": size, "server": 2 * size}}
    return by_role.get(formula, {})


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Train the same with labkit, PyTorch, Horovod and TensorFlow, and record it."
    )
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="only these")
    parser.add_argument("--steps", type=int, default=40, help="of each contender")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default="data/results/elsewhere", help="FILE without its ending")
    given = parser.parse_args()
    check_writable(path := f"{given.out}.json")
    found = run_elsewhere(given.contenders.split(","), given.steps, given.repeats)
    print(elsewhere_table(found))
    how = {"command": "make elsewhere", "config": vars(given)}
    write(how | found | machine(), path)


if __name__ == "__main__":
    main()
