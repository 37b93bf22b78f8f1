"""A turn of a contender: one experiment, trained by labkit or by another framework's script.

The experiment is a file: the shipped digits, and the weights of the course's ``small_cnn``. The
scripts are those that learners read, in notebooks/scripts/elsewhere.
"""

import importlib.util
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from labkit import strategies
from labkit.comm.comm import Comm
from labkit.comm.shared_memory import loopback
from labkit.devices import versions
from labkit.errors import DeadlineError, WorkerError
from labkit.files import write_atomically
from labkit.runtime.launch import run
from labkit.workload.datasets import load_dataset
from labkit.workload.models import build_model
from labkit.workload.samples import batch_slices, epoch_order
from workbook.measure.elsewhere.environments import REPOSITORY, python_of, why_not
from workbook.measure.processes import run_command

SCRIPTS = REPOSITORY / "notebooks" / "scripts" / "elsewhere"
BATCH_SIZE, LR, MOMENTUM = 64, 0.05, 0.9
# The one line in which the script on labkit's ring differs from Horovod's.
THEIR_IMPORT, OUR_IMPORT = "import horovod.torch as hvd", "import labkit.horovod as hvd"
HOROVOD_SCRIPT, OUR_SCRIPT = "horovod_digits.py", "labkit_horovod_digits.py"
_RING = f"{__package__}.ring_script"
_MOST_LETTERS = 300
_ERROR = re.compile(r"[A-Za-z_.]*(?:Error|Exception|Interrupt)\b(?:: |$)|can't open file")


class TurnError(RuntimeError):
    """A contender has failed; the message says how."""


# A turn: ``losses`` of every step (the mean of the global batch before the update), ``step_s`` on
# worker 0, ``sent_bytes`` {process: bytes of every step} by the kernel's count, ``counted_bytes``
# by labkit's (empty where it does not send), and ``versions`` of what took part.
Turn = dict[str, Any]


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
    each = {"losses": turn["losses"], "seconds": turn["step_s"]}
    for name, numbers in (each | turn["sent_bytes"] | turn["counted_bytes"]).items():
        if len(numbers) != steps:
            raise TurnError(f"{name}: {len(numbers)} numbers for {steps} steps")
    return turn


def initial_model(seed: int = 0) -> nn.Sequential:
    """The course's small_cnn for digits, float32."""
    return build_model("small_cnn", num_classes=10, input_shape=(1, 8, 8), seed=seed)


def prepare(folder: Path, steps: int, seed: int = 0, scripts: Path = SCRIPTS) -> None:
    """Put the experiment, of ``steps`` whole batches, and copies of all scripts into a folder.

    Raises:
        ValueError: the scripts are not here, or Horovod's has not exactly one such import.
    """
    if not (scripts / "experiment.py").is_file():
        raise ValueError(f"no experiment.py in {scripts}: run this in a clone of the course")
    for path in scripts.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        write_atomically(folder / path.name, text)
        if path.name == HOROVOD_SCRIPT:
            if text.count(THEIR_IMPORT) != 1:
                raise ValueError(f"{path.name} must have one line {THEIR_IMPORT!r}")
            write_atomically(folder / OUR_SCRIPT, text.replace(THEIR_IMPORT, OUR_IMPORT))
    data = load_dataset("digits")
    batches, epoch = [], 0
    while len(batches) < steps:
        order = epoch_order(len(data.train_targets), epoch=epoch, seed=seed)
        # An epoch's last batch, which is smaller, is left out.
        batches += [b for b in batch_slices(order, BATCH_SIZE) if len(b) == BATCH_SIZE]
        epoch += 1
    chosen, file = torch.stack(batches[:steps]), io.BytesIO()
    state = initial_model(seed).state_dict()
    np.savez(
        file,
        images=data.train_inputs[chosen].numpy(),
        labels=data.train_targets[chosen].numpy(),
        lr=LR,
        momentum=MOMENTUM,
        **{f"weight/{name}": value.numpy() for name, value in state.items()},
    )
    write_atomically(folder / "experiment.npz", file.getvalue())


def module_of(folder: Path) -> Any:
    """A new copy of the module ``experiment`` that is in this folder."""
    spec = importlib.util.spec_from_file_location("experiment", folder / "experiment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Counting:
    """What the scripts measure (their ``Measured``), and labkit's count of bytes beside it.

    Args:
        comm: a function, as a script makes its Comm before its first step.
        measured: a ``Measured``.
    """

    def __init__(self, comm: Callable[[], Comm], measured: Any):
        self._comm, self._measured = comm, measured
        self.step_s: list[float] = measured.step_s
        self.sent_bytes: list[int] = measured.sent_bytes
        self.counted_bytes: list[int] = []

    def __enter__(self) -> "Counting":
        self._before = self._comm().bytes_sent
        self._measured.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._measured.__exit__(*error)
        self.counted_bytes.append(self._comm().bytes_sent - self._before)


def own_turn(
    folder: Path, steps: int, limit_s: float, strategy: str, ranks: int, transport: str
) -> Turn:
    """Train with one of labkit's techniques, on the CPU.

    Raises:
        TurnError: it failed, or took longer than ``limit_s``.
    """
    settings: dict[str, Any] = {"device": "cpu", "timeout_s": limit_s, "transport": transport}
    try:
        reports = run(partial(_train, folder, strategy), world_size=ranks, **settings).values
    except DeadlineError:
        raise TurnError(f"not done after {limit_s:g} s, and so ended") from None
    except (WorkerError, OSError) as error:
        raise TurnError(reason_in(str(error))) from None
    # A rank knows the sum over its own samples.
    totals = [sum(each) for each in zip(*(report["losses"] for report in reports))]
    more = {"losses": totals, "versions": {"torch": versions()["torch"]}}
    return turn_of([report | more for report in reports], steps)


def _train(folder: Path, strategy: str, comm: Comm) -> dict[str, Any]:
    """On a rank: train on its share of every batch; returns its report, without versions."""
    # As on a device of its own.
    torch.set_num_threads(1)
    module = module_of(folder)
    experiment, model = module.Experiment.load(folder / "experiment.npz"), initial_model()
    weights = {name: torch.from_numpy(value) for name, value in experiment.weights.items()}
    model.load_state_dict(weights)
    technique = strategies.get(strategy)()
    rates = {"lr": experiment.lr, "momentum": experiment.momentum}
    technique.setup(comm, model, partial(torch.optim.SGD, **rates))
    index, count = technique.share()
    measured, losses = Counting(lambda: comm, module.Measured()), []
    for step in range(experiment.steps):
        inputs, targets = map(torch.from_numpy, experiment.share(index, count or 1, step))
        batch_size = experiment.labels.shape[1]
        if not count:  # a server works on no samples
            inputs, targets = inputs[:0], targets[:0]
        with measured:
            loss = technique.step(inputs, targets, batch_size)
        losses.append(loss.item() / batch_size)
    name = f"worker {index}" if count else "server"
    return {
        "worker": index if count else -1,
        "losses": losses,
        "step_s": measured.step_s,
        "sent_bytes": {name: measured.sent_bytes},
        "counted_bytes": {name: measured.counted_bytes},
    }


def script_turn(
    folder: Path, steps: int, limit_s: float, script: str, launch: Callable[[Path], Sequence[str]]
) -> Turn:
    """Run a script to its end, and read what it reports.

    Raises:
        TurnError: it failed, took longer than ``limit_s`` or reported something else; nothing
            that it has started is left.
    """
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as name:
        own = Path(name)
        words = [
            *launch(own),
            str(folder / script),
            "--experiment",
            str(folder / "experiment.npz"),
        ]
        words += ["--report", str(own / "report.json")]
        ended = run_command(words, own / "log", limit_s, own, _settings())
        if ended.timed_out:
            raise TurnError(f"not done after {limit_s:g} s, and so ended")
        if ended.returncode:
            log = (own / "log").read_text(encoding="utf-8", errors="replace")
            raise TurnError(f"ended with {ended.returncode}: {reason_in(log)}")
        try:
            files = own.glob("report.json*")
            reports = [json.loads(path.read_text(encoding="utf-8")) for path in files]
        except ValueError as error:
            raise TurnError(f"a file is not a report: {error}") from None
        return turn_of(reports, steps)


def torchrun(folder: Path, workers: int = 2) -> list[str]:
    """Workers on this machine, whose agent unpickles only a file of the private folder."""
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", "1", "--nproc-per-node", str(workers), "--local-addr", "127.0.0.1"),
        *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file"),
        *("--rdzv-endpoint", f"{folder}/store", "--rdzv-id", "elsewhere"),
    ]


def ring_on_one_host(folder: Path) -> list[str]:
    """Workers that run Horovod's script on labkit's ring, in shared memory."""
    return [*torchrun(folder), "-m", _RING, "rank"]


def ring_on_two_hosts(folder: Path) -> list[str]:
    """The same with a host for each worker, so that labkit's messages travel over TCP."""
    return [sys.executable, "-m", _RING, "hosts"]


def horovodrun(folder: Path, workers: int = 2) -> list[str]:
    """Workers on this machine in Horovod's own environment, over gloo."""
    python = _python("horovod")
    launcher = [str(python.with_name("horovodrun")), "--gloo", "-np", str(workers)]
    # Its cache would be a folder in the user's home.
    return [*launcher, "--disable-cache", "--network-interfaces", loopback(), str(python)]


def tensorflow(folder: Path) -> list[str]:
    """TensorFlow's environment; the script starts its own workers."""
    return [str(_python("tensorflow"))]


def _python(framework: str) -> Path:
    python = python_of(framework)
    if python is None:
        raise TurnError(why_not(framework))
    return python


def _settings() -> dict[str, str]:
    """One core for each worker, loopback, no GPU, and this labkit where it is imported."""
    return {
        "OMP_NUM_THREADS": "1",
        "TF_NUM_INTRAOP_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "CUDA_VISIBLE_DEVICES": "-1",
        "GLOO_SOCKET_IFNAME": loopback(),
        "PYTHONPATH": str(REPOSITORY),
        "PYTHONHOME": "",
        "PYTHONUNBUFFERED": "1",
    }


def reason_in(log: str) -> str:
    """The line of a failed program's output that says most: its first error, or its last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # Of a chain of errors the first is the cause; launchers add a summary of their own.
    errors = [line for line in lines if _ERROR.search(line) and "ChildFailedError" not in line]
    return (errors or lines[-1:] or ["without a word"])[0][:_MOST_LETTERS]
