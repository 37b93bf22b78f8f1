#!/usr/bin/env bash
# PyTorch 2.15.0, gloo, CPU tensors: all_gather_into_tensor (all_gather_single) takes an output that
# is the concatenation of the inputs along the first dimension, and refuses the other one that its
# documentation names, their stack along a new first dimension.
#
# Seen: (5,) into (10,): gathered
#       (5,) into (2, 5): invalid tensor size at index 0 (expected (5), got (1, 5))
#       (2, 5) into (4, 5): gathered
#       (2, 5) into (2, 2, 5): invalid tensor size at index 0 (expected (2, 5), got (1, 2, 5))
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.15.0 numpy
cat > "$folder/gather.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for shape in ((5,), (2, 5)):
        values = torch.full(shape, float(rank))
        for size in ((2 * shape[0], *shape[1:]), (2, *shape)):
            found = torch.empty(size)
            try:
                dist.all_gather_into_tensor(found, values)
                said = "gathered"
                assert found.view(2, -1).mean(dim=1).tolist() == [0.0, 1.0]
            except RuntimeError as error:
                said = str(error).partition("allgather: ")[2]
            if rank == 0:
                print(f"{shape} into {size}: {said}", flush=True)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(sys.argv[1],), nprocs=2)
PYTHON
said=$("$folder/env/bin/python" "$folder/gather.py" "$folder/store" 2>&1)
echo "$said"
grep -F "(5,) into (10,): gathered" <<< "$said"
grep -F "(5,) into (2, 5): invalid tensor size" <<< "$said"
grep -F "(2, 5) into (4, 5): gathered" <<< "$said"
grep -F "(2, 5) into (2, 2, 5): invalid tensor size" <<< "$said"
