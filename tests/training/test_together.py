"""Ranks that torchrun has started agree before they train, or all say what differs."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from labkit.config import RunConfig
from labkit.runtime import rounds
from labkit.training import train_run
from labkit.training.resolve import NOTHING

CONFIG = RunConfig("ddp", world_size=3, model="mlp", train_size=64)


@pytest.fixture
def together(monkeypatch):
    """What each of three ranks returns or raises: the first two are on one host."""
    here, hosts = threading.local(), ["one", "one", "two"]
    monkeypatch.setattr(rounds, "join", lambda _: here.round)
    monkeypatch.setattr(rounds, "code", lambda: here.code)
    monkeypatch.setattr(train_run, "_begin", lambda *_: here.begin())

    def on(store, rank, config, begin, code):
        here.round, here.begin, here.code = rounds.Round(rank, 3, hosts, store), begin, code
        try:
            return train_run._begin_together(config, NOTHING, False, 60)
        except (ValueError, OSError) as error:
            return str(error)

    def on_all(configs=(CONFIG,) * 3, begins=(ready,) * 3, codes="aaa"):
        stores = [dist.HashStore()] * 3
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(on, stores, range(3), configs, begins, codes, timeout=240))

    return on_all


def ready(start=None):
    return "technique", (start, "")


def lacks():
    raise FileNotFoundError("no data set digits: get it by --download")


def test_equal_ranks_go_on_and_what_differs_is_named_on_all(together):
    # What belongs to a machine may differ.
    assert together([CONFIG, CONFIG, replace(CONFIG, weights="w")]) == [ready()] * 3
    folders = [partial(ready, Path("a/step-1"))] * 2 + [ready]
    for different, says in (
        ({"configs": [CONFIG, CONFIG, replace(CONFIG, lr=0.1)]}, "lr 0.05 on rank 0 and 0.1 on"),
        ({"codes": "aab"}, "labkit's code a on rank 0 and b on rank 2"),
        ({"begins": folders}, "checkpoint step-1 on rank 0 and None on rank 2"),
    ):
        first, *others = together(**different)
        assert others == [first] * 2
        assert "rank 2 on two is not of the same run as rank 0 on one" in first
        assert says in first
    for error in together(begins=[ready, lacks, ready]):
        assert error == "rank 1 on one: no data set digits: get it by --download"
