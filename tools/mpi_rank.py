"""One MPI rank of ``bench_mpi.py``, which starts it through mpirun.

It waits on a socket, so that it uses no processor time during the turns of others. For each size
that it reads, it runs one checked all-reduce and answers with its seconds. Without a socket it
only prints the number of ranks and the name of the MPI library.

It imports only mpi4py and numpy: with torch it would take seconds to start.
"""

import socket
import sys
import time
import traceback

import numpy as np
from mpi4py import MPI


def main(paths: list[str]) -> None:
    comm = MPI.COMM_WORLD
    if not paths:
        if comm.rank == 0:
            library = MPI.Get_library_version().replace("\0", "").split(",")[0].splitlines()[0]
            print(comm.size, " ".join(library.split()), flush=True)
        return
    try:
        serve(comm, paths[0])
    except Exception:
        traceback.print_exc()
        comm.Abort(1)


def serve(comm: MPI.Comm, path: str) -> None:
    """Answer each size with the seconds of an all-reduce, until the socket closes."""
    tensors: dict[int, tuple[np.ndarray, ...]] = {}
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(path)
        for line in control.makefile(encoding="ascii"):
            num_bytes = int(line)
            if num_bytes not in tensors:
                tensors = {num_bytes: make_tensors(comm, num_bytes)}
            control.sendall(f"{one_turn(comm, *tensors[num_bytes])}\n".encode("ascii"))


def make_tensors(comm: MPI.Comm, num_bytes: int) -> tuple[np.ndarray, ...]:
    """The same as ``Tensors`` in workbook/measure/all_reduce.py."""
    pattern = (np.arange(num_bytes // 4) % 1021).astype(np.float32)
    total = comm.size * (comm.size + 1) // 2
    return pattern * (comm.rank + 1), pattern * total, np.empty_like(pattern)


def one_turn(comm: MPI.Comm, mine: np.ndarray, expected: np.ndarray, work: np.ndarray) -> float:
    # As in ``Tensors.turn`` of workbook/measure/all_reduce.py: the first fills the caches.
    work[:] = 0
    comm.Allreduce(MPI.IN_PLACE, work)
    work[:] = mine
    # As in ``timed`` of workbook/measure/turns.py.
    comm.Barrier()
    comm.Barrier()
    start_s = time.perf_counter()
    comm.Allreduce(MPI.IN_PLACE, work)
    end_s = time.perf_counter()
    if not np.array_equal(work, expected):
        raise ValueError(f"MPI's all-reduce of {work.nbytes} bytes is wrong on rank {comm.rank}")
    return end_s - comm.allreduce(start_s, op=MPI.MAX)


if __name__ == "__main__":
    main(sys.argv[1:])
