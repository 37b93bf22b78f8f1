"""labkit's all-reduce bench with MPI as an additional contender, in turns with the others.

    python tools/bench_mpi.py --world-size 2,4 --sizes 4KiB,1MiB --json FILE --figure FILE.png

It needs mpi4py and an MPI library. MPI ranks are separate processes, which only mpirun can start.
To take turns with labkit's ranks, they wait on a socket for rank 0 of labkit's run.
"""

import argparse
import contextlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from labkit.comm.comm import Comm
from labkit.files import check_writable
from labkit.units import parse_bytes
from workbook.measure.all_reduce import SIZES_BYTES, bench_all_reduce
from workbook.measure.command import show
from workbook.measure.record import command_line
from workbook.measure.turns import agree

PROGRAM = Path(__file__).with_name("mpi_rank.py")
PATIENCE_S = 30.0
_LOOK_S = 0.2
# Without these, Open MPI refuses more ranks than cores, and root in a container.
_OPEN_MPI = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    **dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
    **dict.fromkeys(("PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
}


class NoMpiError(Exception):
    """This machine's MPI cannot take part; the message says why."""


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--world-size", default="2,4", metavar="N,N")
    parser.add_argument("--sizes", metavar="SIZE,SIZE")
    parser.add_argument("--repeats", type=int, default=50, metavar="N")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--figure", metavar="FILE.png")
    given = parser.parse_args(words)
    try:
        world_sizes = tuple(map(int, given.world_size.split(",")))
        sizes = tuple(map(parse_bytes, given.sizes.split(","))) if given.sizes else SIZES_BYTES
        settings = {"world_sizes": world_sizes, "sizes_bytes": sizes, "repeats": given.repeats}
        results = bench_all_reduce(**settings, device="cpu", guests={"MPI": mpi_turns})
        check_writable(given.json, given.figure)
        library = find(max(world_sizes))
    except (ValueError, NoMpiError) as error:
        print(f"bench_mpi: {error}", file=sys.stderr)
        return 2
    how = {"command": command_line(words, "python tools/bench_mpi.py"), "config": settings}
    show(results, how | {"mpi": library}, given.json, given.figure)
    return 0


@contextlib.contextmanager
def mpi_turns(comm: Comm) -> Iterator[Callable[[int], float]]:
    """Let rank 0 time the MPI ranks, while the other ranks wait and report 0 s."""
    with started(comm.world_size) if comm.rank == 0 else contextlib.nullcontext() as ranks:

        def turn(num_bytes: int) -> float:
            seconds = ranks.all_reduce(num_bytes) if ranks else 0.0
            agree(comm, 0)
            return seconds

        yield turn


def find(world_size: int) -> str:
    """The name of this machine's MPI, after a test start of ``world_size`` ranks.

    Raises:
        NoMpiError: no MPI is installed, or it does not start the ranks as one run.
    """
    if importlib.util.find_spec("mpi4py") is None:
        raise NoMpiError("mpi4py is not installed")
    if _launcher() is None:
        raise NoMpiError("there is no mpirun")
    try:
        done = subprocess.run(
            _command(world_size),
            env=os.environ | _OPEN_MPI,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
    except subprocess.TimeoutExpired:
        raise NoMpiError(f"mpirun did not end within {PATIENCE_S:.0f} s") from None
    size, _, library = done.stdout.strip().partition(" ")
    if done.returncode != 0 or size != str(world_size):
        made = f"mpirun was asked for {world_size} ranks of one run, and made {size or 'none'}"
        raise NoMpiError((done.stderr.strip().splitlines() or [made])[-1])
    return library


def _launcher() -> str | None:
    return shutil.which("mpirun") or shutil.which("mpiexec")


def _command(world_size: int, *arguments: str) -> list[str]:
    # -P, so that files in the program's folder do not hide modules of the same name.
    program = [sys.executable, "-P", str(PROGRAM), *arguments]
    return [str(_launcher()), "-n", str(world_size), *program]


class MpiRanks:
    """P MPI ranks that wait for their turn."""

    def __init__(self, connections: list[socket.socket]):
        self._connections = connections
        self._answers = [connection.makefile(encoding="ascii") for connection in connections]

    def all_reduce(self, num_bytes: int) -> float:
        """Run one checked all-reduce of float32 in place; the slowest rank's seconds.

        Raises:
            RuntimeError: a rank has ended, for example because its result was wrong.
        """
        for connection in self._connections:
            connection.sendall(f"{num_bytes}\n".encode("ascii"))
        told = [answers.readline() for answers in self._answers]
        if not all(told):
            raise RuntimeError("an MPI rank has ended: see its message above")
        return max(map(float, told))

    def close(self) -> None:
        """Close the sockets, which ends the ranks."""
        for opened in (*self._answers, *self._connections):
            opened.close()


@contextlib.contextmanager
def started(world_size: int) -> Iterator[MpiRanks]:
    """Start MPI ranks, and end them with the block.

    Raises:
        RuntimeError: they did not connect.
    """
    with contextlib.ExitStack() as stack:
        ranks = MpiRanks(_start(world_size, stack))
        stack.callback(ranks.close)
        yield ranks


def _start(world_size: int, stack: contextlib.ExitStack) -> list[socket.socket]:
    """Start the ranks and return their sockets; the folder is needed until they connect."""
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
        return accept(listener, world_size, process.poll)


def accept(
    listener: socket.socket, world_size: int, exit_code: Callable[[], int | None]
) -> list[socket.socket]:
    """Accept a connection from each rank, while mpirun runs.

    Raises:
        RuntimeError: mpirun ended, or the ranks took longer than ``PATIENCE_S``.
    """
    listener.settimeout(_LOOK_S)
    connections: list[socket.socket] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(connections) < world_size:
        with contextlib.suppress(TimeoutError):
            connections.append(listener.accept()[0])
            continue
        came = f"{len(connections)} of {world_size}"
        if (code := exit_code()) is not None:
            raise RuntimeError(f"mpirun ended with code {code} after {came} ranks had connected")
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"{came} MPI ranks connected within {PATIENCE_S:.0f} s")
    return connections


def _end(process: subprocess.Popen) -> None:
    # mpirun passes terminate on to its ranks.
    for end in (lambda: None, process.terminate, process.kill):
        end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
            return


if __name__ == "__main__":
    sys.exit(main())
