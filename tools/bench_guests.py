"""labkit's all-reduce bench with guests: MPI and DeepSpeed's shared-memory op, in turns with ours.

    python tools/bench_guests.py --world-size 2,4 --sizes 4KiB,1MiB --json FILE --figure FILE.png

A guest takes part where it is installed. MPI needs mpirun and mpi4py; DeepSpeed's op is compiled
from the sources in its package (``pip install --no-deps deepspeed``, ninja and a C++ compiler),
the first time only.

MPI ranks are separate processes, which only mpirun can start. To take turns with labkit's ranks,
they wait on a socket for rank 0 of labkit's run.
"""

import argparse
import contextlib
import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from labkit.collectives import broadcast
from labkit.engine.comm.comm import Comm
from labkit.engine.files import check_writable
from labkit.units import parse_bytes
from workbook.measure.all_reduce import Guest, checked_turns
from workbook.measure.bench import SIZES_BYTES, bench_all_reduce, show
from workbook.measure.turns import Turn

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
        description="Labkit's all-reduce bench beside MPI and DeepSpeed, where they are installed."
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
    how: dict[str, Any] = {"command": shlex.join(["python", *sys.argv]), "config": settings}
    guests: dict[str, Guest] = {}
    if shutil.which("mpirun") and importlib.util.find_spec("mpi4py"):
        how["mpi"] = mpi_library(max(world_sizes))
        guests["MPI"] = mpi_turns
    if importlib.util.find_spec("deepspeed"):
        how["deepspeed"] = importlib.metadata.version("deepspeed")
        guests["DeepSpeed"] = deepspeed_turns
    if not guests:
        sys.exit("bench_guests: found neither mpirun with mpi4py nor deepspeed")
    results = (bench_all_reduce(n, sizes, given.repeats, "cpu", guests) for n in world_sizes)
    show(results, how, given.json, given.figure)


@contextlib.contextmanager
def deepspeed_turns(comm: Comm) -> Iterator[Callable[[int], float]]:
    """Load DeepSpeed's shared-memory all-reduce into these ranks, once for all sizes."""
    from torch.utils import cpp_extension

    package = importlib.util.find_spec("deepspeed")
    assert package is not None
    assert package.submodule_search_locations is not None
    sources = Path(package.submodule_search_locations[0]) / "ops" / "csrc" / "cpu"
    # By its variables it knows that all ranks are on one machine, and names its memory.
    os.environ["LOCAL_SIZE"] = str(comm.world_size)
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    number = broadcast(comm, torch.tensor([os.getpid()]))
    os.environ["MASTER_PORT"] = str(number.item())
    op = cpp_extension.load(
        name="deepspeed_shm_comm",
        sources=[str(sources / "comm" / name) for name in ("shm_interface.cpp", "shm.cpp")],
        extra_include_paths=[str(sources / "includes")],
        extra_cflags=["-O3", "-march=native", "-fopenmp"],
    )
    op.initialize(comm.world_size, comm.rank)
    reduce = torch.ops.deepspeed.inference_all_reduce_
    turns: dict[int, Turn] = {}

    def turn(num_bytes: int) -> float:
        if num_bytes not in turns:
            turns[num_bytes] = checked_turns(comm, num_bytes, {"DeepSpeed": reduce})["DeepSpeed"]
        return turns[num_bytes]()

    yield turn
    comm.barrier()
    # It leaves its memory behind.
    for path in Path("/dev/shm").glob(f"deepspeed_*_{os.environ['MASTER_PORT']}_*{comm.rank}"):
        path.unlink()


def mpi_library(world_size: int) -> str:
    """The MPI library's name and version, told by as many ranks as will take part."""
    # A test start: mpirun, or mpi4py, says itself what is missing.
    with start(world_size, stdout=subprocess.PIPE, text=True) as tried:
        count, _, library = tried.communicate(timeout=TIMEOUT_S)[0].strip().partition(" ")
    if count != str(world_size):
        asked = f"mpirun was asked for {world_size} ranks of one run"
        sys.exit(f"bench_guests: {asked}, and made {count or 0}")
    return library


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
