"""MPI as a contender, where mpi4py and an MPI are installed: found at run time, never needed.

MPI ranks are processes of their own, which only mpirun can start. They take their turn repeat by
repeat all the same: between turns they wait on a socket for rank 0 of labkit's run.
"""

import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROGRAM = Path(__file__).with_name("mpi_rank.py")
_PATIENCE_S = 30.0
_LOOK_S = 0.2
# More ranks than cores, and root in a container: OpenMPI takes neither unless it is told to.
_OPEN_MPI = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    **dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
    **dict.fromkeys(("PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
}


@dataclass(frozen=True)
class Found:
    """The MPI of this machine: its name, or why it takes no part."""

    library: str = ""
    missing: str = ""


def find(world_size: int) -> Found:
    """Start ``world_size`` MPI ranks once, to see that they find each other."""
    if importlib.util.find_spec("mpi4py") is None:
        return Found(missing="mpi4py is not installed")
    if _launcher() is None:
        return Found(missing="there is no mpirun")
    try:
        done = subprocess.run(
            _command(world_size),
            env=os.environ | _OPEN_MPI,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        return Found(missing=f"mpirun was not done in {_PATIENCE_S:.0f} s")
    size, _, library = done.stdout.strip().partition(" ")
    if done.returncode != 0 or size != str(world_size):
        made = f"asked for {world_size} ranks of one run, mpirun made {size or 'none'}"
        return Found(missing=(done.stderr.strip().splitlines() or [made])[-1])
    return Found(library=library)


def _launcher() -> str | None:
    return shutil.which("mpirun") or shutil.which("mpiexec")


def _command(world_size: int, *arguments: str) -> list[str]:
    # -P: the program's own folder must not hide modules.
    program = [sys.executable, "-P", str(_PROGRAM), *arguments]
    return [str(_launcher()), "-n", str(world_size), *program]


class MpiRanks:
    """P MPI ranks that wait for their turn."""

    def __init__(self, connections: list[socket.socket]):
        self._connections = connections
        self._answers = [connection.makefile(encoding="ascii") for connection in connections]

    def all_reduce(self, num_bytes: int) -> float:
        """Let them do one checked all-reduce of float32 in place; the last rank's seconds.

        Raises:
            RuntimeError: one of them has ended, for instance since its result was wrong.
        """
        for connection in self._connections:
            connection.sendall(f"{num_bytes}\n".encode("ascii"))
        said = [answers.readline() for answers in self._answers]
        if not all(said):
            raise RuntimeError("an MPI rank has ended: its own words stand above")
        return max(map(float, said))

    def close(self) -> None:
        """They leave when their sockets close."""
        for opened in (*self._answers, *self._connections):
            opened.close()


@contextlib.contextmanager
def started(world_size: int) -> Iterator[MpiRanks]:
    """Start MPI ranks, and end them: they leave when their sockets close.

    Raises:
        RuntimeError: they did not come.
    """
    with contextlib.ExitStack() as stack:
        connections = _start(world_size, stack)
        ranks = MpiRanks(connections)
        stack.callback(ranks.close)
        yield ranks


def _start(world_size: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    """The ranks' sockets; the folder in which they meet is needed no longer than that."""
    with (
        tempfile.TemporaryDirectory(prefix="labkit-mpi-") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        path = str(Path(folder) / "turns")
        listener.bind(path)
        listener.listen(world_size)
        command, settings = _command(world_size, path), os.environ | _OPEN_MPI
        process = subprocess.Popen(command, env=settings, stdin=subprocess.DEVNULL)
        stack.callback(_end, process)
        return _accept(listener, world_size, process)


def _accept(
    listener: socket.socket, world_size: int, process: subprocess.Popen
) -> list[socket.socket]:
    listener.settimeout(_LOOK_S)
    connections: list[socket.socket] = []
    deadline_s = time.monotonic() + _PATIENCE_S
    while len(connections) < world_size:
        with contextlib.suppress(TimeoutError):
            connections.append(listener.accept()[0])
            continue
        came = f"{len(connections)} of {world_size}"
        if (code := process.poll()) is not None:
            raise RuntimeError(f"mpirun ended with code {code} after {came} ranks had come")
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{came} MPI ranks came in {_PATIENCE_S:.0f} s")
    return connections


def _end(process: subprocess.Popen) -> None:
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        # mpirun passes it on to its ranks.
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
