#!/usr/bin/env bash
# The mean cross-entropy of nothing but ignored targets is NaN, and its gradient is zero; of nothing but weightless classes both are NaN.
#
# torch 2.15.0, CPU. F.cross_entropy of a batch in which every target is ignore_index divides zero by zero, so the loss is NaN, but backward
# skips ignored targets before it divides: the gradients are zeros, and training goes on with a NaN in the curve alone. If the targets count
# and the weight of their class is 0, the same division gives NaN gradients, which end the training.
#
# Seen:
#   all ignored: loss nan, sum of |gradient| 0.0
#   class weight 0: loss nan, sum of |gradient| nan
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.15.0 numpy
cat > "$folder/case.py" <<'PYTHON'
import math

import torch
from torch.nn.functional import cross_entropy


def loss_and_gradient(target, weight):
    logits = torch.randn(3, 4, requires_grad=True)
    loss = cross_entropy(logits, torch.full((3,), target), weight=weight)
    loss.backward()
    return loss.item(), logits.grad.abs().sum().item()


ignored = loss_and_gradient(-100, None)
weightless = loss_and_gradient(3, torch.tensor([1.0, 1.0, 1.0, 0.0]))
print(f"all ignored: loss {ignored[0]}, sum of |gradient| {ignored[1]}")
print(f"class weight 0: loss {weightless[0]}, sum of |gradient| {weightless[1]}")
assert math.isnan(ignored[0]) and ignored[1] == 0
assert math.isnan(weightless[0]) and math.isnan(weightless[1])
PYTHON
"$folder/env/bin/python" "$folder/case.py"
