"""labkit's all-reduce bench with MPI as an additional contender, in turns with the others.

    python tools/bench_mpi.py --world-size 2,4 --sizes 4KiB,1MiB --json FILE --figure FILE.png

It needs mpi4py and an MPI library. MPI ranks are separate processes, which only mpirun can start.
To take turns with labkit's ranks, they wait on a socket for rank 0 of labkit's run.
"""

import argparse
import contextlib
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from labkit.comm.comm import Comm
from labkit.files import check_writable
from labkit.units import parse_bytes
from workbook.measure.all_reduce import SIZES_BYTES, bench_all_reduce
from workbook.measure.command import show

PROGRAM = Path(__file__).with_name("mpi_rank.py")
TIMEOUT_S = 30.0
# Without these, Open MPI refuses more ranks than cores, and root in a container.
OPEN_MPI = {
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    **dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
    **dict.fromkeys(("PRTE_ALLOW_RUN_AS_ROOT", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM"), "1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Labkit's all-reduce bench with MPI as an additional contender."
    )
    parser.add_argument("--world-size", default="2,4", metavar="N,N")
    parser.add_argument("--sizes", metavar="SIZE,SIZE")
    parser.add_argument("--repeats", type=int, default=50, metavar="N")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--figure", metavar="FILE.png")
    given = parser.parse_args()
    world_sizes = tuple(map(int, given.world_size.split(",")))
    sizes = tuple(map(parse_bytes, given.sizes.split(","))) if given.sizes else SIZES_BYTES
    settings = {"world_sizes": world_sizes, "sizes_bytes": sizes, "repeats": given.repeats}
    check_writable(given.json, given.figure)
    on_cpu = {"device": "cpu"}
    guests = {"MPI": mpi_turns}
    results = (bench_all_reduce(n, sizes, given.repeats, on_cpu, guests) for n in world_sizes)
    # A test start: mpirun, or mpi4py, says itself what is missing.
    most = max(world_sizes)
    with start(most, stdout=subprocess.PIPE, text=True) as tried:
        count, _, library = tried.communicate(timeout=TIMEOUT_S)[0].strip().partition(" ")
    if count != str(most):
        sys.exit(f"bench_mpi: mpirun was asked for {most} ranks of one run, and made {count or 0}")
    how = {"command": shlex.join(["python", *sys.argv]), "config": settings, "mpi": library}
    show(results, how, given.json, given.figure)


def start(world_size: int, *arguments: str, **pipes: Any) -> subprocess.Popen[str]:
    # -P, so that files in the program's folder do not hide modules of the same name.
    words = ["mpirun", "-n", str(world_size), sys.executable, "-P", str(PROGRAM), *arguments]
    return subprocess.Popen(words, env=os.environ | OPEN_MPI, stdin=subprocess.DEVNULL, **pipes)


@contextlib.contextmanager
def mpi_turns(comm: Comm) -> Iterator[Callable[[int], float]]:
    """Let rank 0 time the MPI ranks, while the other ranks wait and report 0 s."""
    with contextlib.ExitStack() as stack:
        ranks = mpi_ranks(comm.world_size, stack) if comm.rank == 0 else []

        def turn(num_bytes: int) -> float:
            """The seconds of the slowest rank in one checked all-reduce of float32 in place."""
            for rank in ranks:
                print(num_bytes, file=rank, flush=True)
            # A rank that has ended, as its result was wrong, answers with an empty line.
            seconds = max((float(rank.readline()) for rank in ranks), default=0.0)
            comm.barrier()
            return seconds

        yield turn


def mpi_ranks(world_size: int, stack: contextlib.ExitStack) -> list[Any]:
    """A file to talk to each of the MPI ranks, which end when it is closed.

    Raises:
        TimeoutError: they did not connect.
    """
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="labkit-mpi-"))
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(f"{folder}/turns")
    listener.listen(world_size)
    listener.settimeout(TIMEOUT_S)
    process = stack.enter_context(start(world_size, f"{folder}/turns"))
    # mpirun passes it on to its ranks.
    stack.callback(process.terminate)
    connections = [stack.enter_context(listener.accept()[0]) for _ in range(world_size)]
    return [stack.enter_context(one.makefile("rw", encoding="ascii")) for one in connections]


if __name__ == "__main__":
    main()
