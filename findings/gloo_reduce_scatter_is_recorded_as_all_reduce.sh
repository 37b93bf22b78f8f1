#!/usr/bin/env bash
# PyTorch 2.15.0, gloo: profiles and flight recorders know no reduce-scatter, only all-reduces.
#
# On gloo reduce_scatter_tensor is an all-reduce of the whole input, and reduce_scatter one
# all-reduce per rank. The profiler's backend event and the flight recorder's entry name these:
# "gloo:all_reduce" with the shape of the whole input, and world_size entries for one
# reduce_scatter. So in FSDP on gloo the dumps of a hang name a collective that the program nowhere
# calls, the collective's number is not the number of calls, and a rank in reduce_scatter_tensor
# looks like one in all_reduce of a tensor as large. The event of the call,
# "c10d::_reduce_scatter_base_", is in the profile alone.
#
# Seen (3 ranks, parts of 8 numbers):
#   reduce_scatter_tensor: 1 x gloo:all_reduce [[24]]
#   reduce_scatter: 3 x gloo:all_reduce [[8]]
#   all_gather_into_tensor: 1 x gloo:all_gather [[8]]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.15.0 numpy
cat > "$folder/case.py" <<'PYTHON'
import json
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._C._distributed_c10d import _dump_fr_trace_json
from torch.profiler import ProfilerActivity, profile

RANKS = 3
REDUCED, GATHERED = "gloo:all_reduce", "gloo:all_gather"


def recorded_of(call):
    """Return the recorder's entries and the profiler's events of one call."""
    before = len(json.loads(_dump_fr_trace_json(True, False))["entries"])
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        call()
    entries = json.loads(_dump_fr_trace_json(True, False))["entries"][before:]
    names = [event.name for event in profiler.events()]
    events = sorted(name for name in names if name.startswith(("c10d::", "gloo:")))
    return [(entry["profiling_name"], entry["input_sizes"]) for entry in entries], events


def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    dist.barrier()
    whole = torch.ones(RANKS * 8)
    part = torch.empty(8)
    calls = {
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, whole),
        "reduce_scatter": lambda: dist.reduce_scatter(part, list(whole.chunk(RANKS))),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, torch.ones(8)),
    }
    found = {name: recorded_of(call) for name, call in calls.items()}
    if rank == 0:
        for name, (entries, _) in found.items():
            print(f"{name}: {len(entries)} x {entries[0][0]} {entries[0][1]}")
    assert found == {
        "reduce_scatter_tensor": (
            [(REDUCED, [[RANKS * 8]])],
            ["c10d::_reduce_scatter_base_", REDUCED],
        ),
        "reduce_scatter": (
            [(REDUCED, [[8]])] * RANKS,
            ["c10d::reduce_scatter_", *[REDUCED] * RANKS],
        ),
        "all_gather_into_tensor": ([(GATHERED, [[8]])], ["c10d::_allgather_base_", GATHERED]),
    }
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(sys.argv[1],), nprocs=RANKS)
PYTHON
export OMP_NUM_THREADS=1 TORCH_FR_BUFFER_SIZE=2000
"$folder/env/bin/python" "$folder/case.py" "$folder/store" 2> "$folder/errors" || {
    tail -20 "$folder/errors"
    exit 1
}
