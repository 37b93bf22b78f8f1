"""What ``nvidia-smi`` says of driver, cards and links, as data.

It is asked in a process of its own and may do anything: be absent, hang in the driver, print
rubbish. ``Unanswered`` then says why there is no answer. CUDA is not initialised.
"""

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from labkit.runtime.gpu_links import Topology, Unanswered, read_topology
from labkit.units import format_seconds

PATIENCE_S = 30.0
# Where Windows has it for Linux (WSL), mostly without a place in PATH.
_ALSO_IN = "/usr/lib/wsl/lib"
# The driver in the kernel answers even where nvidia-smi does not.
DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/nvidia/version"))
_REPORT = ("-q", "-x")
_MULTIPLES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


@dataclass(frozen=True)
class Card:
    """A GPU as ``nvidia-smi`` numbers it, which may differ from PyTorch's ``cuda:N``.

    Attributes:
        used_bytes: memory in use by all programs; None if it is not told, as under MIG.
        programs: the processes that compute on it, as far as this container sees them.
        compute_mode: ``Default``, ``Exclusive_Process`` or ``Prohibited``; empty if not told.
        mig_slices: instances of a GPU whose MIG mode is on; None where it is off.
        keeps_driver: persistence mode; None if it is not told.
    """

    index: int
    name: str
    uuid: str = ""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    programs: int = 0
    compute_mode: str = ""
    mig_slices: int | None = None
    keeps_driver: bool | None = None


@dataclass(frozen=True)
class Machine:
    """Driver and cards. ``cuda`` is the newest CUDA that the driver can run, such as 12.4."""

    driver: str
    cuda: str
    cards: tuple[Card, ...]


def machine() -> Machine:
    """Driver and cards.

    Raises:
        Unanswered: not told, see there.
    """
    return read_machine(_ask(*_REPORT))


def capabilities() -> dict[int, tuple[int, int]]:
    """The compute capability of each card; empty if this ``nvidia-smi`` is too old to tell."""
    try:
        rows = _ask("--query-gpu=index,compute_cap", "--format=csv,noheader").splitlines()
    except Unanswered:
        return {}
    found = (re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\.(\d+)\s*", row) for row in rows)
    return {int(row[1]): (int(row[2]), int(row[3])) for row in found if row}


def topology() -> Topology:
    """The connections between GPUs, and to network cards.

    Raises:
        Unanswered: not told, see there.
    """
    return read_topology(_ask("topo", "-m"))


def peer_access() -> dict[tuple[int, int], str]:
    """For pairs of GPUs ``OK`` if one can read the other's memory, or a code that says why not.

    Raises:
        Unanswered: not told, see there.
    """
    return read_topology(_ask("topo", "-p2p", "r")).pairs()


def kernel_driver() -> str:
    """The driver's version as the kernel tells it; empty if there is no driver."""
    for file in DRIVER_FILES:
        with contextlib.suppress(OSError):
            found = re.search(r"\b\d{3,4}\.\d+(\.\d+)?\b", file.read_text(errors="replace"))
            if found:
                return found[0]
    return ""


def facts() -> dict[str, Any]:
    """All of it, to be recorded as JSON with results; ``problem`` says what was not told."""
    found: dict[str, Any] = {"driver": kernel_driver()}
    try:
        seen = machine()
        found |= asdict(seen)
        if len(seen.cards) > 1:
            links, access = topology(), peer_access()
            found["links"] = {f"{a} {b}": code for (a, b), code in links.links.items()}
            found |= {"cores": links.cores, "numa_nodes": links.nodes}
            found["peer_access"] = {f"{a} {b}": code for (a, b), code in access.items()}
    except Unanswered as error:
        found["problem"] = str(error)
    return found


def read_machine(text: str) -> Machine:
    """Read the answer to ``nvidia-smi -q -x``.

    Raises:
        Unanswered: it is not that.
    """
    # Warnings may stand before and after it.
    report = re.search(r"<nvidia_smi_log>.*</nvidia_smi_log>", text, re.DOTALL)
    if report is None:
        raise Unanswered("nvidia-smi -q -x gives no whole report")
    try:
        log = ElementTree.fromstring(report[0])
    except ElementTree.ParseError as error:
        raise Unanswered(f"nvidia-smi -q -x gives a broken report ({error})") from None
    cards = tuple(_card(index, gpu) for index, gpu in enumerate(log.findall("gpu")))
    return Machine(_told(log, "driver_version"), _told(log, "cuda_version"), cards)


def _card(index: int, gpu: ElementTree.Element) -> Card:
    mig = _told(gpu, "mig_mode/current_mig") == "Enabled"
    persistence = _told(gpu, "persistence_mode")
    kinds = [_told(one, "type") for one in gpu.findall("processes/process_info")]
    return Card(
        index,
        _told(gpu, "product_name") or "a GPU without a name",
        _told(gpu, "uuid"),
        _bytes(_told(gpu, "fb_memory_usage/total")),
        _bytes(_told(gpu, "fb_memory_usage/used")),
        # G is for graphics alone.
        sum(kind != "G" for kind in kinds),
        _told(gpu, "compute_mode"),
        len(gpu.findall("mig_devices/mig_device")) if mig else None,
        persistence == "Enabled" if persistence else None,
    )


def _told(element: ElementTree.Element, path: str) -> str:
    text = " ".join((element.findtext(path) or "").split())
    return "" if re.fullmatch(r"\[?(N/A|Not Supported|Unknown Error)\]?", text) else text


def _bytes(text: str) -> int | None:
    amount = re.fullmatch(r"(\d+)\s*([KMGT]?i?B)", text)
    return int(amount[1]) * _MULTIPLES[amount[2]] if amount and amount[2] in _MULTIPLES else None


def _ask(*words: str) -> str:
    """What ``nvidia-smi`` prints; asked once per process, as each failure may take PATIENCE_S.

    Raises:
        Unanswered: it is not there, cannot be started, fails, or takes longer than PATIENCE_S.
    """
    if words != _REPORT:
        _ask(*_REPORT)  # Where this has no answer, nothing else is tried.
    said, problem = _asked(words)
    if problem:
        raise Unanswered(problem)
    return said


@functools.cache
def _asked(words: tuple[str, ...]) -> tuple[str, str]:
    try:
        return _run(words), ""
    except Unanswered as error:
        return "", str(error)


def _run(words: tuple[str, ...]) -> str:
    program = shutil.which("nvidia-smi") or shutil.which("nvidia-smi", path=_ALSO_IN)
    if program is None:
        raise Unanswered("nvidia-smi is not installed")
    try:
        asked = subprocess.Popen(
            [program, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        raise Unanswered(f"{program} cannot be started ({error.strerror})") from None
    try:
        said = asked.communicate(timeout=PATIENCE_S)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        # Not waited for without end: a process that hangs in the driver may never end.
        with contextlib.suppress(OSError):
            os.killpg(asked.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            asked.wait(timeout=1)
        if asked.stdout:
            asked.stdout.close()
        seconds = format_seconds(PATIENCE_S)
        raise Unanswered(f"nvidia-smi gave no answer within {seconds}") from None
    # A damaged card is an exit code, too, beside a whole report.
    if asked.returncode and "</nvidia_smi_log>" not in said:
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        told = lines[0][:300] if lines else "it says nothing"
        raise Unanswered(f"nvidia-smi fails with exit code {asked.returncode}: {told}")
    return said
