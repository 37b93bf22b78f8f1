"""Ranks on two hosts with a network between them: the same results, and a cut cable is named."""

import json

import pytest
from hosts_program import BASE, CASES
from safetensors.torch import load_file
from two_hosts import ROOT, Torchrun, TwoHosts, why_not

from labkit import train_with
from labkit.training.result import largest_difference

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts():
    if missing := why_not():
        pytest.skip(missing)
    with TwoHosts() as made:
        yield made


@pytest.fixture(scope="module")
def trained(hosts, tmp_path_factory):
    """(folder of states, whether replicas agree by case, the job, which is sending endlessly)."""
    folder = tmp_path_factory.mktemp("states")
    words = [str(ROOT / "tests" / "hosts_program.py"), str(folder), "endless"]
    job = Torchrun(hosts, 2, words, 29500)
    return folder, json.loads(job.line("trained ")), job


def test_techniques_equal_one_device_over_two_hosts(trained):
    folder, agree, _ = trained
    alone = train_with("single", **BASE).state
    differences = {name: largest_difference(load_file(folder / name), alone) for name in CASES}
    assert {name: d for name, d in differences.items() if d >= 1e-10} == {}
    assert agree == dict.fromkeys(CASES, True)


def test_a_cut_cable_names_the_lost_host(trained, hosts):
    *_, job = trained
    job.line("endless")
    hosts.run(1, "ip", "link", "set", "cable", "down")
    try:
        job.line("labkit: rank 2 (host 1) and rank 3 (host 1) cannot be reached", timeout_s=60)
    finally:
        hosts.run(1, "ip", "link", "set", "cable", "up")
    assert "hosts_program.py, line" in job.line("  rank 0 (host 0) was waiting at")
