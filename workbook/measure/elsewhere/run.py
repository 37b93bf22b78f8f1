"""The one run: in each round every contender that is here trains once, in turns.

The experiment is a file: the shipped digits, and the weights of the course's ``small_cnn``. The
scripts are those that learners read, in notebooks/scripts/elsewhere.
"""

import importlib
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from labkit import strategies
from labkit.comm.comm import Comm
from labkit.comm.shared_memory import kill_marked, loopback
from labkit.costs.traffic import parameter_server_cost, ring_all_reduce_cost
from labkit.errors import WorkerError
from labkit.runtime.launch import run
from labkit.units import check_choice, check_integer
from labkit.workload.datasets import load_dataset
from labkit.workload.models import build_model
from labkit.workload.samples import epoch_order
from workbook.measure.elsewhere.environments import REPOSITORY, python_of, version_in, why_not
from workbook.measure.spread import Spread, rounded

ONE_DEVICE = "one device"
SCRIPTS = REPOSITORY / "notebooks" / "scripts" / "elsewhere"
BATCH_SIZE, LR, MOMENTUM = 64, 0.05, 0.9
# The one line in which the script on labkit's ring differs from Horovod's.
THEIR_IMPORT, OUR_IMPORT = "import horovod.torch as hvd", "import labkit.horovod as hvd"
HOROVOD_SCRIPT, OUR_SCRIPT = "horovod_digits.py", "labkit_horovod_digits.py"
# Who trains for longer than this hangs: the slowest takes some seconds to start.
_LIMIT_S, _KILLED_S = 120.0, 10.0
_MOST_WARM_UP, _MARK = 5, "LABKIT_BENCH"
# Of a script: a core for each worker, loopback, no GPU, and this labkit where it is imported.
_ENVIRONMENT = dict.fromkeys(("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS"), "1") | {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "-1",
    "GLOO_SOCKET_IFNAME": loopback(),
    "PYTHONPATH": str(REPOSITORY),
    "PYTHONHOME": "",
}

# A turn: ``losses`` of every step (the mean of the global batch before the update), ``step_s`` on
# worker 0, ``sent_bytes`` {process: bytes of every step} by the kernel's count, ``counted_bytes``
# by labkit's (empty where it does not count), and ``versions`` of what took part.
Turn = dict[str, Any]


class TurnError(RuntimeError):
    """A contender has failed; the message says how."""


@dataclass(frozen=True)
class Contender:
    """One way to train.

    Attributes:
        take_turn: (folder, steps, limit in seconds) -> a turn.
        framework: whose it is.
        messages: how they travel: ``TCP``, ``shared memory``, or none.
        formula: of the bytes that a worker sends: ``all-reduce``, ``server``; empty for none.
        environment: the environment that it needs, see ``environments``; empty for ours.
    """

    take_turn: Callable[[Path, int, float], Turn]
    framework: str = "labkit"
    messages: str = "none"
    formula: str = ""
    environment: str = ""


def initial_model(seed: int = 0) -> nn.Sequential:
    """The course's small_cnn for digits, float32."""
    return build_model("small_cnn", num_classes=10, input_shape=(1, 8, 8), seed=seed)


def prepare(folder: Path, steps: int, seed: int = 0) -> None:
    """Put the experiment, of ``steps`` whole batches, and copies of all scripts into a folder."""
    for path in SCRIPTS.glob("*.py"):
        shutil.copy(path, folder)
    text = (folder / HOROVOD_SCRIPT).read_text(encoding="utf-8")
    assert text.count(THEIR_IMPORT) == 1
    (folder / OUR_SCRIPT).write_text(text.replace(THEIR_IMPORT, OUR_IMPORT), encoding="utf-8")
    data, state = load_dataset("digits"), initial_model(seed).state_dict()
    count = len(data.train_targets)
    # An epoch's last batch, which is smaller, is left out.
    whole = count // BATCH_SIZE * BATCH_SIZE
    epochs = math.ceil(steps * BATCH_SIZE / whole)
    order = [epoch_order(count, epoch=epoch, seed=seed)[:whole] for epoch in range(epochs)]
    chosen = torch.cat(order).view(-1, BATCH_SIZE)[:steps]
    np.savez(
        folder / "experiment.npz",
        images=data.train_inputs[chosen].numpy(),
        labels=data.train_targets[chosen].numpy(),
        lr=LR,
        momentum=MOMENTUM,
        **{f"weight/{name}": value.numpy() for name, value in state.items()},
    )


def turn_of(reports: Iterable[Turn], steps: int) -> Turn:
    """One turn of what its processes report; losses and seconds are worker 0's.

    Raises:
        TurnError: a report is missing, or does not have a number for every step.
    """
    by_worker = {report["worker"]: report for report in reports}
    if 0 not in by_worker:
        raise TurnError("worker 0 has not reported")
    turn: Turn = by_worker[0] | {"sent_bytes": {}, "counted_bytes": {}}
    for _, report in sorted(by_worker.items()):
        turn["sent_bytes"] |= report["sent_bytes"]
        turn["counted_bytes"] |= report.get("counted_bytes", {})
    for numbers in (turn["losses"], turn["step_s"], *turn["sent_bytes"].values()):
        if len(numbers) != steps:
            raise TurnError(f"{len(numbers)} numbers for {steps} steps")
    return turn


def own_turn(
    folder: Path, steps: int, limit_s: float, strategy: str, ranks: int, transport: str
) -> Turn:
    """Train with one of labkit's techniques, on the CPU."""
    settings: dict[str, Any] = {"device": "cpu", "timeout_s": limit_s, "transport": transport}
    try:
        reports = run(partial(_train, folder, strategy), world_size=ranks, **settings).values
    except WorkerError as error:
        raise TurnError(_reason_in(str(error))) from None
    # A rank knows the sum over its own samples.
    totals = [sum(each) for each in zip(*(report["losses"] for report in reports))]
    more = {"losses": totals, "versions": {"torch": torch.__version__}}
    return turn_of([report | more for report in reports], steps)


def _train(folder: Path, strategy: str, comm: Comm) -> dict[str, Any]:
    """On a rank: train on its share of every batch; returns its report, without versions."""
    torch.set_num_threads(1)  # as on a device of its own
    sys.path.insert(0, str(folder))
    module: Any = importlib.import_module("experiment")
    experiment, model = (module.Experiment.load(folder / "experiment.npz"), initial_model())
    technique = strategies.get(strategy)()
    rates = {"lr": experiment.lr, "momentum": experiment.momentum}
    technique.setup(comm, model, partial(torch.optim.SGD, **rates))
    index, count = technique.share()
    batch_size, measured = experiment.labels.shape[1], module.Measured()
    losses, counted = [], []
    for step in range(experiment.steps):
        inputs, targets = map(torch.from_numpy, experiment.share(index, count or 1, step))
        if not count:  # a server works on no samples
            inputs, targets = inputs[:0], targets[:0]
        before = comm.bytes_sent
        with measured:
            loss = technique.step(inputs, targets, batch_size)
        counted.append(comm.bytes_sent - before)
        losses.append(loss.item() / batch_size)
    name = f"worker {index}" if count else "server"
    report = {"worker": index if count else -1, "losses": losses, "step_s": measured.step_s}
    return report | {"sent_bytes": {name: measured.sent_bytes}, "counted_bytes": {name: counted}}


def script_turn(
    folder: Path, steps: int, limit_s: float, script: str, launch: Callable[[Path], Sequence[str]]
) -> Turn:
    """Run a script to its end, and read what it reports; nothing that it has started is left."""
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as name:
        own = Path(name)
        words = [*launch(own), str(folder / script)]
        words += ["--experiment", str(folder / "experiment.npz")]
        words += ["--report", str(own / "report.json")]
        try:
            code = run_command(words, own / "log", limit_s)
        except subprocess.TimeoutExpired:
            raise TurnError(f"not done after {limit_s:g} s, and so ended") from None
        if code:
            log = (own / "log").read_text(encoding="utf-8", errors="replace")
            raise TurnError(f"ended with {code}: {_reason_in(log)}")
        reports = [json.loads(path.read_text()) for path in own.glob("report.json*")]
        return turn_of(reports, steps)


def run_command(words: Sequence[str], log: Path, limit_s: float) -> int:
    """Run a command in the folder of ``log``, which gets all it prints; the exit code.

    However this ends, by Ctrl-C as well, no process that the command has started remains, those
    with a session of their own either: all of them carry a mark in their environment.

    Raises:
        subprocess.TimeoutExpired: it was ended after ``limit_s``.
    """
    mark, pipes = (
        secrets.token_hex(8),
        {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT},
    )
    settings = os.environ | _ENVIRONMENT | {_MARK: mark, "TMPDIR": str(log.parent)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            words, cwd=log.parent, env=settings, stdout=output, start_new_session=True, **pipes
        )
    try:
        return process.wait(limit_s)
    finally:
        kill_marked(_MARK, mark, _KILLED_S, process.poll)
        process.wait()


def _torchrun(folder: Path) -> list[str]:
    """Workers on this machine, whose agent unpickles only a file of the private folder."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", "2", "--local-addr", "127.0.0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"),
        *("--rdzv-endpoint", f"{folder}/store", "--rdzv-id", "elsewhere"),
    ]


def _horovodrun(folder: Path) -> list[str]:
    """Workers on this machine in Horovod's own environment, over gloo."""
    python = python_of("horovod")
    assert python is not None
    launcher = [str(python.with_name("horovodrun")), "--gloo", "-np", "2"]
    # Its cache would be a folder in the user's home.
    return [*launcher, "--disable-cache", "--network-interfaces", loopback(), str(python)]


def _tensorflow(folder: Path) -> list[str]:
    """TensorFlow's environment; the script starts its own workers."""
    return [str(python_of("tensorflow"))]


def _reason_in(log: str) -> str:
    """The first error in a failed program's output (the cause of others), or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()] or ["without a word"]
    return next((line for line in lines if re.search(r"Error(: |$)", line)), lines[-1])


def _own(strategy: str, transport: str, ranks: int = 2, formula: str = "all-reduce") -> Contender:
    take = partial(own_turn, strategy=strategy, ranks=ranks, transport=transport)
    messages = "TCP" if transport == "gloo" else "shared memory"
    return Contender(take, messages=messages if ranks > 1 else "none", formula=formula)


def _script(script: str, launch: Callable[[Path], Sequence[str]], *fields: str) -> Contender:
    return Contender(partial(script_turn, script=script, launch=launch), *fields)


CONTENDERS = {
    ONE_DEVICE: _own("single", "auto", 1, ""),
    "labkit ddp": _own("ddp", "auto"),
    "labkit ring_all_reduce": _own("ring_all_reduce", "auto"),
    "labkit parameter_server": _own("parameter_server", "auto", 3, "server"),
    "labkit ddp over TCP": _own("ddp", "gloo"),
    "labkit ring_all_reduce over TCP": _own("ring_all_reduce", "gloo"),
    "labkit parameter_server over TCP": _own("parameter_server", "gloo", 3, "server"),
    "PyTorch DDP": _script("ddp_digits.py", _torchrun, "PyTorch", "TCP", "all-reduce"),
    "labkit.horovod": _script(OUR_SCRIPT, _torchrun, "labkit", "shared memory", "all-reduce"),
    "Horovod": _script(HOROVOD_SCRIPT, _horovodrun, "Horovod", "TCP", "all-reduce", "horovod"),
    "MirroredStrategy": _script(
        "mirrored.py", _tensorflow, "TensorFlow", "none", "", "tensorflow"
    ),
    "MultiWorkerMirroredStrategy": _script(
        "multi_worker.py", _tensorflow, "TensorFlow", "TCP", "all-reduce", "tensorflow"
    ),
    "ParameterServerStrategy": _script(
        "parameter_server.py", _tensorflow, "TensorFlow", "TCP", "server", "tensorflow"
    ),
}


def run_elsewhere(
    contenders: Sequence[str] | None = None,
    steps: int = 12,
    repeats: int = 1,
    *,
    tell: Callable[[str], object] = lambda line: None,
    among: Mapping[str, Contender] = CONTENDERS,
    limit_s: float = _LIMIT_S,
) -> dict[str, Any]:
    """Train the same model with every contender; the record of losses, bytes and seconds.

    A contender that fails is out of the later rounds, and its row says why. However this ends, no
    process and no file of it is left.

    Args:
        contenders: only these; one device always trains, first, as the reference.
        steps: batches of 64 digits. The first few warm up: their seconds and bytes do not count.
        repeats: how often each contender trains.
        tell: called with a line when one begins to train.
        among: all that there are.
        limit_s: who trains for longer has failed.

    Raises:
        ValueError: an unknown contender, no steps, no repeats.
    """
    check_integer("steps", steps)
    check_integer("repeats", repeats)
    for name in contenders or ():
        check_choice("contender", name, among)
    wanted = {ONE_DEVICE, *(contenders or among)}
    chosen = {name: one for name, one in among.items() if name in wanted}
    found: dict[str, list[Turn]] = {name: [] for name in chosen}
    absent = {n: why_not(c.environment) for n, c in chosen.items() if c.environment}
    problems = {name: reason for name, reason in absent.items() if reason}
    # A short path: sockets lie in it.
    with tempfile.TemporaryDirectory(prefix="lk-", ignore_cleanup_errors=True) as private:
        prepare(Path(private), steps)
        for repeat in range(repeats):
            names = [name for name in found if name not in problems]
            first = repeat % max(1, len(names))
            for name in names[first:] + names[:first]:
                tell(f"round {repeat + 1} of {repeats}: {name}")
                try:
                    found[name].append(chosen[name].take_turn(Path(private), steps, limit_s))
                except TurnError as error:
                    problems[name] = str(error)
    truth = found[ONE_DEVICE][0]["losses"] if found[ONE_DEVICE] else None
    rows = []
    for name, one in chosen.items():
        row = {"contender": name, "framework": one.framework, "messages": one.messages}
        row |= {"problem": problems.get(name, ""), "absent": bool(absent.get(name))}
        rows.append(row | (_numbers(one, found[name], truth) if truth and found[name] else {}))
    return {"batch_size": BATCH_SIZE, "contenders": rows}


def _numbers(contender: Contender, taken: list[Turn], truth: list[float]) -> dict[str, Any]:
    """A contender's measurements; bytes are those of a process per step, means over all turns."""
    # The first steps of a turn are left out: frameworks compile, and buffers are made.
    warm_up = min(_MOST_WARM_UP, len(truth) // 2)
    apart = [abs(a - b) for turn in taken for a, b in zip(turn["losses"], truth, strict=True)]
    # Not max alone: it overlooks a NaN.
    known = all(map(math.isfinite, apart))
    seconds = [one for turn in taken for one in turn["step_s"][warm_up:]]
    per_step = {
        kind: {
            process: statistics.fmean(b for turn in taken for b in turn[kind][process][warm_up:])
            for process in taken[0][kind]
        }
        for kind in ("sent_bytes", "counted_bytes")
    }
    # TensorFlow has kernels of its own.
    tolerance = 1e-4 if contender.framework == "TensorFlow" else 1e-5
    versions = {"labkit": metadata.version("labkit")} if contender.framework == "labkit" else {}
    if contender.framework == "Horovod":
        versions = {"horovod": version_in("horovod", "horovod")}
    return per_step | {
        "losses": taken[0]["losses"],
        "tolerance": tolerance,
        "difference": max(apart) if known else None,
        "agrees": known and max(apart) <= tolerance,
        "formula_bytes": formula_bytes(contender.formula),
        "seconds": rounded(seconds),
        "step_s": asdict(Spread.of(seconds)),
        "versions": versions | taken[0]["versions"],
    }


def formula_bytes(formula: str, workers: int = 2) -> dict[str, int]:
    """What each role sends per step of the course's model, by the formula of a contender.

    ``all-reduce``: 2 (P - 1) / P S. ``server``: a worker sends its gradient, S, and the server
    the new parameters to each worker, W S.
    """
    shape = sum(p.numel() for p in initial_model().parameters()), 4
    if formula == "all-reduce":
        return {"worker": ring_all_reduce_cost(*shape, workers).num_bytes}
    costs = [parameter_server_cost(*shape, workers + 1, rank).num_bytes for rank in (1, 0)]
    return dict(zip(("worker", "server"), costs)) if formula == "server" else {}
