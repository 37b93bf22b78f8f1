"""Run a client on 2 and 3 ranks with gloo and with labkit, and compare what the ranks return.

    python tests/clients/start_client.py torch_clients ddp

The ranks find the variables that torchrun sets. What a client imports is imported
once, before they are forked: ten ranks that import a trainer for themselves take minutes.
"""

import ast
import contextlib
import importlib
import inspect
import os
import random
import socket
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import labkit


def main(module_name, name):
    client = getattr(importlib.import_module(module_name), name)
    import_for(client)
    for size in (2, 3):
        expected = run_ranks(client, "gloo", size)
        results = run_ranks(client, "labkit", size)
        assert torch.cat([torch.as_tensor(x).flatten() for x in results[0]]).isfinite().all()
        rounding = getattr(client, "rounding", 1e-5)
        torch.testing.assert_close(results, expected, rtol=10 * rounding, atol=rounding)
        print(f"{name}: {size} ranks, {len(results[0])} values a rank, equal to gloo's")


def import_for(client):
    """Carry out the import statements in a client's body."""
    for node in ast.walk(ast.parse(inspect.getsource(client))):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            exec(ast.unparse(node), {})


def free_port():
    """Return a port below those that the system gives out, where a client could meet itself."""
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def run_ranks(client, backend, size):
    """Run ``client(backend)`` on each rank; returns what each returned."""
    # Rank 0 serves the store: in this process its threads could hold a lock during a fork.
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "client", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        options = (client, backend, folder)
        mp.start_processes(be_rank, options, nprocs=size, start_method="fork")
        return [torch.load(Path(folder, f"{rank}.pt")) for rank in range(size)]


def be_rank(rank, client, backend, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.chdir(folder)
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    result = client(backend)
    torch.save(result, f"{rank}.pt")
    # Programs that never talk to each other agree with gloo's as well.
    assert (labkit.backend.sent()[0] > 0) == (backend == "labkit")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
