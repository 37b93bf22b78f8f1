#!/usr/bin/env bash
# PyTorch's own Adafactor on PyTorch's own sharded parameters: an error under one wrapper, other numbers under the other.
#
# Version: torch 2.15.0 (CPU, two processes, gloo, float64).
# Adafactor keeps row and column averages of a matrix and divides by norms of a whole parameter: it looks at shapes.
#   - `fully_shard` (FSDP2) keeps the shapes, in DTensors. Adafactor's first step raises on every rank: RuntimeError,
#     aten.pow_.Scalar changes the placement of its operand in place. AdamW steps.
#   - `FullyShardedDataParallel(use_orig_params=True)` hands the optimizer pieces of one flat parameter, 1-D or empty.
#     Adafactor takes them for vectors and steps without a word; the result is not that of one device. With AdamW,
#     which works number by number, it is.
# Seen, largest difference from one process after three steps with lr 0.01:
#   FullyShardedDataParallel AdamW      below 1e-12
#   FullyShardedDataParallel Adafactor  5e-03
#   fully_shard AdamW                   below 1e-12
#   fully_shard Adafactor               RuntimeError: aten.pow_.Scalar: in-place operations that require placement ...
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.15.0 numpy==2.4.6
cat > "$folder/shards.py" <<'PYTHON'
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

WRAPPERS = ("FullyShardedDataParallel", "fully_shard")


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def train(model, name):
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
    inputs = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
    for _ in range(3):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def outcome(wrapper, name):
    expected = make_model()
    train(expected, name)
    model = make_model()
    if wrapper == "fully_shard":
        fully_shard(model)
    else:
        model = FullyShardedDataParallel(model, use_orig_params=True, device_id=torch.device("cpu"))
    try:
        train(model, name)
    except RuntimeError as error:
        return f"{type(error).__name__}: {str(error)[:70]}"
    if wrapper == "fully_shard":
        parameters = [parameter.full_tensor() for parameter in model.parameters()]
    else:
        with FullyShardedDataParallel.summon_full_params(model):
            parameters = [parameter.detach().clone() for parameter in model.parameters()]
    pairs = zip(parameters, expected.parameters())
    largest = max((one - other).abs().max().item() for one, other in pairs)
    return f"{largest:.0e}" if largest > 1e-12 else "below 1e-12"


def main(rank, folder):
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    expected = {
        ("FullyShardedDataParallel", "AdamW"): "below 1e-12",
        ("FullyShardedDataParallel", "Adafactor"): "5e-03",
        ("fully_shard", "AdamW"): "below 1e-12",
        ("fully_shard", "Adafactor"): "RuntimeError: aten.pow_.Scalar",
    }
    for (wrapper, name), start in expected.items():
        seen = outcome(wrapper, name)
        if rank == 0:
            print(f"{wrapper} {name}: {seen}")
        if not seen.startswith(start):
            raise SystemExit(f"{wrapper} {name}: now {seen}, was {start}")
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1],), nprocs=2)
PYTHON
"$folder/env/bin/python" "$folder/shards.py" "$folder"
