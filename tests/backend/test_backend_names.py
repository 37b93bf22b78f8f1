"""The names by which programs ask PyTorch for the backend: alone, and beside other backends."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
import torch
import torch.distributed as dist
from ranks import plain
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def trains(rank):
    """A step of DDP, collectives, a group of its own, a message from any rank."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    model(torch.full((4, 3), rank + 1.0)).sum().backward()
    group = dist.new_group([0, 1])
    dist.all_reduce(total := torch.tensor([rank + 1.0]), group=group)
    dist.all_gather_object(objects := [None] * 2, {"rank": rank}, group=group)
    if rank == 0:
        dist.send(torch.ones(1), 1)
    else:
        assert dist.recv(torch.zeros(1)) == 0
    later = dist.all_reduce(torch.ones(1), async_op=True)
    later.wait()
    dist.destroy_process_group(group)
    found = model.module.weight.grad.tolist(), total.item(), objects, later.is_completed()
    return found, dist.get_backend_impl(device=torch.device("cuda")).name()


@pytest.mark.parametrize("name", ["cpu:labkit,cuda:gloo", "cuda:gloo,cpu:labkit"])
def test_another_backend_stands_beside_it_for_another_device(tmp_path, name):
    gradients = [[6.0] * 3] * 2
    expected = (gradients, 3.0, [{"rank": 0}, {"rank": 1}], True), "gloo"
    assert plain(tmp_path, trains, 2, name) == [(0, expected)] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cpu:gloo,cuda:labkit", "for CPU tensors. Name another backend for each other device"),
        ("cuda:labkit", "for CPU tensors. Name another backend for each other device"),
    ],
)
def test_a_name_that_cannot_be_served_is_refused(name, words):
    with pytest.raises(ValueError, match=words):
        dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    assert not dist.is_initialized()


# Not where labkit is only on PYTHONPATH.
FOUND_BY_NAME = bool(entry_points(group="torch.distributed.backends", name="labkit"))


@pytest.mark.fresh
@pytest.mark.skipif(not FOUND_BY_NAME, reason="labkit is not installed")
@pytest.mark.parametrize("name", ["labkit", "cpu:labkit,cuda:gloo"])
def test_a_program_that_never_imports_labkit_finds_it_by_name(tmp_path, name):
    script = f"""
import torch
import torch.distributed as dist
dist.init_process_group({name!r}, store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(3))
print(type(dist.group.WORLD).__module__.split(".")[0])
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True)
    assert (run.returncode, run.stdout.decode().strip()) == (0, "labkit"), run.stderr.decode()
