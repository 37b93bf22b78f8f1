#!/usr/bin/env bash
# DTensor's loss_parallel cannot go backward through cross_entropy with class weights if a target is ignored.
#
# torch 2.15.0, CPU, one process. F.cross_entropy(logits, targets, weight=w) of logits that are sharded by class, inside
# torch.distributed.tensor.parallel.loss_parallel(): forward gives the right loss, and backward
# raises "RuntimeError: index -100 is out of bounds for dimension 1 with size 3", because it looks up the weight of every target, also
# of those that are -100 (ignore_index). Without weights, or without ignored targets, backward works; plain tensors work with both.
#
# Seen:
#   weights, no ignored target: gradient as of plain tensors
#   ignored target, no weights: gradient as of plain tensors
#   weights and an ignored target: RuntimeError: index -100 is out of bounds for dimension 1 with size 3
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.15.0 numpy
cat > "$folder/case.py" <<'PYTHON'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
torch.manual_seed(0)
logits = torch.randn(4, 3)
weights = torch.tensor([1.0, 2.0, 3.0])


def gradients(targets, weight):
    plain = logits.clone().requires_grad_()
    cross_entropy(plain, targets, weight=weight).backward()
    cut = distribute_tensor(logits.clone(), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        cross_entropy(cut, targets, weight=weight).backward()
    return torch.allclose(cut.grad.to_local(), plain.grad)


whole, padded = torch.tensor([0, 1, 2, 1]), torch.tensor([0, 1, -100, 1])
assert gradients(whole, weights)
print("weights, no ignored target: gradient as of plain tensors")
assert gradients(padded, None)
print("ignored target, no weights: gradient as of plain tensors")
try:
    gradients(padded, weights)
except RuntimeError as error:
    print("weights and an ignored target: RuntimeError:", error)
    assert "index -100 is out of bounds" in str(error)
else:
    raise SystemExit("it works now")
dist.destroy_process_group()
PYTHON
"$folder/env/bin/python" "$folder/case.py"
