#!/usr/bin/env bash
# PyTorch's DistributedDataParallel: the default size of a bucket, and that size given by name, are different things.
#
# Version: torch 2.15.0 (CPU is enough, one process, gloo).
# The documentation of `bucket_cap_mb` says: "If None, a default size of 25 MiB will be used". So one would expect
# DistributedDataParallel(model) and DistributedDataParallel(model, bucket_cap_mb=25) to be the same. They are not:
#   - left out, the first bucket holds 1 MiB, the others 25 MiB;
#   - given, whatever the number, all buckets have that size. A model with 1 to 25 MiB of gradients is then a single
#     bucket, which leaves when backward is over: nothing overlaps. A script that "writes the default down" loses it.
#   - `bucket_cap_mb_list=[1, 25]` (new in 2.15) brings the small bucket back. But in the first step its sizes are dealt
#     out in the order of registration: the small bucket holds the model's first layers, whose gradients come last.
#   - in the first step the other two have one bucket for everything: sizes count from the second step on.
# Seen, MiB by step of a model with 8 layers of 1 MiB (buckets in the order in which they were reduced):
#   left out                       [[8], [1, 7], [1, 7]]
#   bucket_cap_mb=25               [[8], [8], [8]]
#   bucket_cap_mb_list=[1, 25]     [[7, 1], [1, 7], [1, 7]]
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.15.0 numpy
cat > "$folder/buckets.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
EXPECTED = {
    "left out": ({}, [[8], [1, 7], [1, 7]]),
    "bucket_cap_mb=25": ({"bucket_cap_mb": 25}, [[8], [8], [8]]),
    "bucket_cap_mb_list=[1, 25]": ({"bucket_cap_mb_list": [1, 25]}, [[7, 1], [1, 7], [1, 7]]),
}
for name, (options, expected) in EXPECTED.items():
    layers = [nn.Linear(512, 512, bias=False) for _ in range(8)]
    model = DistributedDataParallel(nn.Sequential(*layers), **options)
    steps = []

    def count(state, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        steps[-1].append(bucket.buffer().nbytes // 2**20)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    model.register_comm_hook(None, count)
    for _ in range(3):
        steps.append([])
        model(torch.randn(2, 512)).sum().backward()
    print(f"{name:30} {steps}")
    if steps != expected:
        raise SystemExit(f"{name}: now {steps}, was {expected}")
dist.destroy_process_group()
PYTHON
"$folder/env/bin/python" "$folder/buckets.py"
