"""One MPI rank of ``bench_guests.py``, which starts it through mpirun.

It waits on a socket, so that it uses no processor time during the turns of others. For each size
that it reads, it runs one checked all-reduce and answers with its seconds. Without a socket it
only prints the number of ranks and the name of the MPI library.

It imports only mpi4py and numpy: with torch it would take seconds to start.
"""

import socket
import sys
import time

import numpy as np
from mpi4py import MPI


def serve(comm: MPI.Comm, path: str) -> None:
    """Answer each size with the seconds of an all-reduce, until the socket closes."""
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(path)
        for line in control.makefile(encoding="ascii"):
            control.sendall(f"{one_turn(comm, int(line))}\n".encode("ascii"))


def one_turn(comm: MPI.Comm, num_bytes: int) -> float:
    # The same as ``checked_turns`` in workbook/measure/all_reduce.py: the first fills the caches.
    pattern = (np.arange(num_bytes // 4) % 1021).astype(np.float32)
    mine, expected = pattern * (comm.rank + 1), pattern * (comm.size * (comm.size + 1) // 2)
    work = np.zeros_like(pattern)
    comm.Allreduce(MPI.IN_PLACE, work)
    work[:] = mine
    # As in ``timed`` of workbook/measure/turns.py.
    comm.Barrier()
    comm.Barrier()
    start_s = time.perf_counter()
    comm.Allreduce(MPI.IN_PLACE, work)
    end_s = time.perf_counter()
    if not np.array_equal(work, expected):
        print(f"MPI's all-reduce of {num_bytes} bytes is wrong", file=sys.stderr, flush=True)
        comm.Abort(1)
    return end_s - comm.allreduce(start_s, op=MPI.MAX)


if __name__ == "__main__":
    if sys.argv[1:]:
        serve(MPI.COMM_WORLD, sys.argv[1])
    elif MPI.COMM_WORLD.rank == 0:
        library = MPI.Get_library_version().replace("\0", "").split(",")[0].splitlines()[0]
        print(MPI.COMM_WORLD.size, " ".join(library.split()), flush=True)
