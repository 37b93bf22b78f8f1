"""Every technique over two hosts: equal to one device in float64, replicas equal to the bit.

The ranks are started as torchrun starts them (``tests/hosts.py``): three, on hosts of one and two.
"""

import os
import sys

import pytest
import torch
from hosts import on_hosts
from torch import nn

import labkit
from labkit import strategies
from labkit.training.result import largest_difference

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/PID/fd")

SETTINGS = {"batch_size": 10, "epochs": 1, "model": "mlp", "dataset": "digits"}
SETTINGS |= {"dtype": "float64", "train_size": 25, "seed": 3}
OWN_PACE = "async_parameter_server"
# One process with several devices, or one device: there is nothing to distribute over hosts.
IN_ONE_PROCESS = ("single", "data_parallel")
# What cuts layers cuts those of a transformer.
OF_TEXT = {"model": "gpt", "dataset": "text"}
OF_EXPERTS = OF_TEXT | {"model": "moe_gpt"}
OWN_WORK = {"tensor_parallel": OF_TEXT, "mesh": OF_TEXT | {"tp": 3}}
OWN_WORK["expert_parallel"] = OF_EXPERTS
TECHNIQUES = {
    name: {"strategy": name} | OWN_WORK.get(name, {})
    for name in strategies.STRATEGIES
    if name not in IN_ONE_PROCESS
}
TECHNIQUES |= {f"{name}, built in": TECHNIQUES[name] | {"builtin": True} for name in TECHNIQUES}
# On hosts with other numbers of threads, its ranks round what all of them compute differently.
del TECHNIQUES["tensor_parallel, built in"], TECHNIQUES["mesh, built in"]
TECHNIQUES["ddp on labkit"] = {"strategy": "ddp", "builtin": True, "backend": "labkit"}
TECHNIQUES["sums inside hosts first"] = {"strategy": "ring_all_reduce", "hierarchical": True}
TECHNIQUES["so do buckets"] = {"strategy": "ddp", "bucket_mb": 0.0, "hierarchical": True}
TECHNIQUES["bounded staleness"] = {"strategy": OWN_PACE, "max_staleness": 4}
APPROXIMATE = {"topk": {"strategy": "ring_all_reduce", "compress": "topk"}}


def trains(folder, techniques, settings):
    """A program: train with each technique, and leave what came of it in the folder."""
    rank, world_size = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    for name, options in techniques.items():
        result = labkit.train_with(**settings | options, world_size=world_size)
        if rank == "0":
            kept = {"state": result.state, "agree": result.replicas_agree}
            kept |= {"messages": result.messages, "bytes": result.bytes_sent}
            torch.save(kept, f"{folder}/{name}.pt")


def trained_on_hosts(sizes, folder, techniques, settings):
    hosts = on_hosts(trains, sizes, str(folder), techniques, settings)
    assert all(code == 0 for host in hosts for code in host.codes.values()), [
        host.text for host in hosts
    ]
    return {name: torch.load(folder / f"{name}.pt") for name in techniques}


@pytest.mark.more
def test_every_technique_follows_one_device(tmp_path):
    settings = (SETTINGS, SETTINGS | OF_TEXT, SETTINGS | OF_EXPERTS)
    techniques = TECHNIQUES | APPROXIMATE
    alone = {one["model"]: labkit.train_with("single", **one).state for one in settings}
    found = trained_on_hosts([1, 2], tmp_path, techniques, SETTINGS)
    for name, result in found.items():
        assert result["agree"], name
        if OWN_PACE not in str(techniques[name]) and name not in APPROXIMATE:
            state = alone[techniques[name].get("model", SETTINGS["model"])]
            assert largest_difference(result["state"], state) < 1e-10, name
    for name in ("ddp", "parameter_server", "pipeline", "topk"):
        here = labkit.train_with(**SETTINGS, **techniques[name], world_size=3)
        counts = here.messages, here.bytes_sent
        assert (found[name]["messages"], found[name]["bytes"]) == counts, name


def test_batch_norm_and_checkpoints(tmp_path):
    layers = nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10)
    settings = SETTINGS | {"model": nn.Sequential(*layers)}
    ring = {"strategy": "ring_all_reduce", "sync_batch_norm": True}
    kept = ring | {"checkpoint_dir": str(tmp_path / "kept")}
    again = kept | {"resume": True}
    techniques = {"whole": ring, "begun": kept | {"epochs": 1}, "continued": again}
    techniques = {name: {"epochs": 2} | options for name, options in techniques.items()}
    del settings["epochs"]
    found = trained_on_hosts([1, 2], tmp_path, techniques, settings)
    alone = labkit.train_with("single", **settings, epochs=2)
    assert largest_difference(found["whole"]["state"], alone.state) < 1e-10
    same = zip(found["whole"]["state"].values(), found["continued"]["state"].values())
    assert all(torch.equal(one, other) for one, other in same)


def differs():
    """A program: what each rank is told that trains with a rate of its own."""
    try:
        labkit.train_with("ddp", world_size=2, lr=0.1 + int(os.environ["RANK"]))
    except ValueError as error:
        print(f"told: {error}", flush=True)


def test_ranks_that_differ_are_told_so_on_all_hosts():
    for host in on_hosts(differs, [1, 1]):
        assert "is not of the same run as rank 0" in host.text
        assert "lr 0.1 on rank 0 and 1.1 on rank 1" in host.text
