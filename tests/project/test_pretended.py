"""Pretended GPUs (tests/pretended) behave as real ones where labkit looks.

That the pages run on them, ``make test-pretended`` shows.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.slow


MISTAKES = """
import torch

def fails(action):
    try:
        action()
    except (RuntimeError, TypeError) as error:
        return str(error)

here, there = torch.ones(3), torch.ones(3, device="cuda:1")
assert (2 * there)[1:].device == torch.device("cuda:1") != there.cpu().device == here.device
assert torch.cuda.memory_allocated(1) == 512
assert "same device" in fails(lambda: here + there)
assert "same device" in fails(lambda: torch.stack([here, there]))
assert "same device" in fails(lambda: torch.nn.Linear(3, 2).cuda()(here))
assert "Tensor.cpu()" in fails(there.numpy)
assert "ordinal" in fails(lambda: torch.ones(1, device="cuda:2"))
assert "generator" in fails(lambda: torch.rand(1, device="cuda", generator=torch.Generator()))

layer, seen = torch.nn.Linear(3, 2).cuda(), []
layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.device))
with torch.autocast("cuda"):
    layer(here.cuda()).sum().backward()
assert seen == [torch.device("cuda:0")]
"""


def test_tensors_on_the_wrong_device_are_noticed():
    variables = {k: v for k, v in os.environ.items() if "VISIBLE_DEVICES" not in k}
    path = os.pathsep.join(map(str, (ROOT / "tests" / "pretended", ROOT)))
    variables |= {"LABKIT_PRETEND_GPUS": "2", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", MISTAKES], env=variables, check=True)
