"""A program of ranks on two hosts: it trains with some techniques, then sends until it is stopped.

Usage: ``torchrun ... hosts_program.py FOLDER [endless]``. Its settings are CASES; states go to
FOLDER.
"""

import json
import os
import sys
from pathlib import Path

import torch

import labkit
from labkit.collectives import ring_all_reduce

# 25 samples in batches of 14 and 11: shares of 4, 4, 3 and 3, and of 3, 3, 3 and 2.
BASE = {"batch_size": 14, "train_size": 25, "epochs": 1, "dtype": "float64", "model": "small_cnn"}
STAGES = {"split_points": "1,3,5"}
CASES = {
    "ddp": {"strategy": "ddp"},
    "ddp, PyTorch's on labkit": {"strategy": "ddp", "builtin": True, "backend": "labkit"},
    "ring, hierarchical": {"strategy": "ring_all_reduce", "hierarchical": True},
    "ddp, hierarchical": {"strategy": "ddp", "hierarchical": True},
    "parameter servers": {"strategy": "parameter_server", "servers": 2},
    "model parallel, PyTorch's": {"strategy": "model_parallel", "builtin": True, **STAGES},
    "pipeline": {"strategy": "pipeline", "micro_batches": 3, **STAGES},
}


def endless(comm):
    """Sum over all ranks again and again."""
    tensor = torch.ones(1000)
    for step in range(10**9):
        ring_all_reduce(comm, tensor, "mean")
        if step == 3 and comm.rank == 0:
            print("endless", flush=True)


def main():
    folder, *more = sys.argv[1:]
    ranks, agree = int(os.environ["WORLD_SIZE"]), {}
    for name, settings in CASES.items():
        result = labkit.train_with(**BASE, **settings, world_size=ranks)
        agree[name] = result.replicas_agree
        if os.environ["RANK"] == "0":
            result.save_state(Path(folder) / name)
    if os.environ["RANK"] == "0":
        print(f"trained {json.dumps(agree)}", flush=True)
    if more:
        labkit.run(endless, world_size=ranks)


if __name__ == "__main__":
    main()
