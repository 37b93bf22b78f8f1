#!/usr/bin/env bash
# PyTorch 2.15.0: a pipeline stage must not begin with an in-place layer.
#
# nn.Sequential(Linear, ReLU(inplace=True), Linear) trains on one device, and as two stages of
# torch.distributed.pipelining if the cut lies behind the ReLU. Cut before it, the second stage
# receives into a leaf that requires a gradient, and its first layer may not change that in place:
# a RuntimeError names a leaf variable, not the stage. 13 of the 30 cuts in the features of
# torchvision's VGG16 lie before such a ReLU.
#
# Seen:
#   one device: trained
#   cut before layer 2: trained
#   cut before layer 1: RuntimeError: a leaf Variable that requires grad is being used in an
#     in-place operation.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.15.0 numpy
cat > "$folder/case.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def network():
    torch.manual_seed(0)
    return [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)]


def train(rank, cut, store, outcome):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    layers = network()[:cut] if rank == 0 else network()[cut:]
    stage = PipelineStage(nn.Sequential(*layers), rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 2, loss_fn=nn.MSELoss())
    try:
        if rank == 0:
            schedule.step(torch.ones(4, 4))
        else:
            schedule.step(target=torch.zeros(4, 4))
            outcome.put("trained")
    except Exception as error:
        while error.__cause__ is not None:
            error = error.__cause__
        if rank == 1:
            outcome.put(f"{type(error).__name__}: {str(error).splitlines()[0]}")


if __name__ == "__main__":
    nn.Sequential(*network())(torch.ones(4, 4)).sum().backward()
    print("one device: trained")
    outcomes = {}
    for cut in (2, 1):
        outcome = mp.get_context("spawn").SimpleQueue()
        mp.spawn(train, (cut, f"{sys.argv[1]}/store{cut}", outcome), nprocs=2)
        outcomes[cut] = outcome.get()
        print(f"cut before layer {cut}: {outcomes[cut]}")
    assert outcomes[2] == "trained", "a stage that begins with another layer trains"
    assert "leaf Variable that requires grad" in outcomes[1], "an in-place first layer trains now"
PYTHON
"$folder/env/bin/python" "$folder/case.py" "$folder"
