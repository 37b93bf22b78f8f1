"""A DataLoader with workers inside a rank: data sets of a notebook, no process left."""

import multiprocessing
import sys

import pytest
import torch
from ranks import wait_until
from torch.utils.data import DataLoader, Dataset

from labkit import run
from labkit.engine.comm.shared_memory import is_running

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="workers are forked on Linux only"
)


class Squares(Dataset):
    """x and x squared; it travels by value, as a class of a notebook's cell does."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int):
        return torch.tensor(float(index)), index**2


def use_workers(comm):
    loader = DataLoader(Squares(), batch_size=5, num_workers=2, persistent_workers=True)
    for _ in range(2):
        pairs = [torch.stack([x.long() ** 2, y]) for x, y in loader]
    values = torch.cat(pairs, dim=1)
    comm.barrier()
    # The loader's workers are alive when the function returns.
    children = [child.pid for child in multiprocessing.active_children()]
    sys.modules[__name__ + "_keeps"] = iter(loader)
    return values, children


def test_workers_serve_a_data_set_that_no_process_could_import():
    result = run(use_workers, world_size=2)
    for values, children in result.values:
        assert values[0].tolist() == values[1].tolist() == [n**2 for n in range(24)]
        assert len(children) == 2
        assert wait_until(lambda pids=children: not any(map(is_running, pids)), 60)
