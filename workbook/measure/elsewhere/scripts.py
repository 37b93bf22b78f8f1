"""A turn of a script: launched as its framework wants it, ended whatever happens, then read."""

import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from labkit.comm.processes import loopback
from workbook.measure.elsewhere.digits import Place
from workbook.measure.elsewhere.environments import REPOSITORY, python_of, why_not
from workbook.measure.elsewhere.turn import Turn, TurnError, read_reports, reason_in
from workbook.measure.processes import run_command

# A function of a private folder: the words of the command line before the script.
Launch = Callable[[Path], Sequence[str]]
_RING = "workbook.measure.elsewhere.ring_script"


def turn(place: Place, steps: int, limit_s: float, *, script: str, launch: Launch) -> Turn:
    """Run a script to its end, and read what it reports.

    Raises:
        TurnError: it failed, took longer than ``limit_s`` or reported something else; nothing
            that it has started is left.
    """
    with tempfile.TemporaryDirectory(dir=place.folder, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        report, log = folder / "report.json", folder / "log"
        words = [*launch(folder), str(place.script(script))]
        words += ["--experiment", str(place.experiment), "--report", str(report)]
        ended = run_command(words, log, limit_s, folder, _settings())
        if ended.timed_out:
            raise TurnError(f"not done after {limit_s:g} s, and so ended")
        if ended.returncode:
            reason = reason_in(log.read_text(encoding="utf-8", errors="replace"))
            raise TurnError(f"ended with {ended.returncode}: {reason}")
        return Turn.of(read_reports(folder), steps)


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
