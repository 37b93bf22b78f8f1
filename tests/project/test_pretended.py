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


def printed(script, number=2):
    """What a script prints in a process that sees ``number`` GPUs; its errors fail the test."""
    variables = {k: v for k, v in os.environ.items() if "VISIBLE_DEVICES" not in k}
    path = os.pathsep.join(map(str, (ROOT / "tests" / "pretended", ROOT)))
    variables |= {"LABKIT_PRETEND_GPUS": str(number), "PYTHONPATH": path}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    assert not done.returncode, done.stderr
    return done.stdout


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
    printed(MISTAKES)


RUNS = """
import torch, labkit
import torch.distributed as dist

def facts(comm):
    mine, theirs = (torch.full((3,), float(comm.rank), device=comm.device) for _ in range(2))
    comm.exchange(mine, 1 - comm.rank, theirs, 1 - comm.rank)
    dist.all_reduce(mine)
    return str(comm.device), dist.get_backend(), theirs[0].item(), mine[0].item()

def forgets(comm):
    comm.send(torch.ones(3), 1) if comm.rank == 0 else comm.recv(torch.ones(3), 0)

if __name__ == "__main__":
    (layer,) = labkit.run(
        lambda comm: torch.nn.Linear(2, 1).to(comm.device), world_size=1, device="cuda"
    ).values
    print(type(layer.weight).__name__, layer.weight.device)
    for transport in ("auto", "gloo"):
        print(*labkit.run(facts, world_size=2, device="auto", transport=transport).values)
    try:
        labkit.run(forgets, world_size=2, device="auto")
    except labkit.WorkerError as error:
        print(".to(comm.device)" in str(error))
    settings = {"train_size": 100, "batch_size": 35, "dtype": "float64", "device": "cuda"}
    ring, single = (labkit.train_with(name, world_size=size, **settings)
                    for name, size in (("ring_all_reduce", 2), ("single", 1)))
    print(ring.difference_from(single) < 1e-10, ring.replicas_agree)
    print("initialised here:", torch.cuda.is_initialized())
"""


def test_ranks_get_gpus_and_the_caller_none():
    over = "('cuda:0', '{0}', 1.0, 1.0) ('cuda:1', '{0}', 0.0, 1.0)"
    # Also from inside an object, a result's tensors come to the CPU.
    lines = ["Parameter cpu", over.format("nccl"), over.format("gloo"), "True", "True True"]
    assert printed(RUNS).splitlines() == [*lines, "initialised here: False"]


def test_a_process_without_them_is_not_changed():
    script = "import sys, torch; print(torch.cuda.device_count(), 'pretended_gpus' in sys.modules)"
    assert printed(script, number=0) == "0 False\n"
