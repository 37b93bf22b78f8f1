"""A notebook's cell on two hosts with a network between them, through a cluster of Ray.

Ray on one machine: tests/engine/runtime/test_ray.py.
"""

import importlib.util
import json
import subprocess
import sys

import pytest
from two_hosts import ROOT, RayCluster, TwoHosts, why_not

# Runs in the first host: a notebook with a kernel there. It prints the cell's outputs.
NOTEBOOK = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(sys.argv[1])])
NotebookClient(notebook, timeout=200, kernel_name="python3").execute()
print("".join(output.get("text", "") for output in notebook.cells[0].outputs))
"""
CELL = """
import json, os, socket, time, torch, labkit
from labkit.collectives import hierarchical_all_reduce

def where(comm):
    print("hello from rank", comm.rank)
    total = hierarchical_all_reduce(comm, torch.ones(5) * 10**comm.rank)
    return socket.gethostname(), os.readlink("/proc/self/ns/net"), total.tolist(), comm.hosts

found = labkit.run(where, world_size=4, hosts=2).values
# Ray prints the ranks' lines when it has them.
time.sleep(5)
print("found", json.dumps(found))
"""


def missing() -> str:
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed (make cluster)"
    if importlib.util.find_spec("nbclient") is None:
        return "nbclient is not installed"
    return why_not()


@pytest.fixture(scope="module")
def hosts():
    if reason := missing():
        pytest.skip(reason)
    with TwoHosts() as made:
        RayCluster(made)
        yield made


@pytest.mark.slow
def test_a_cell_runs_on_two_hosts(hosts):
    process = hosts.popen(
        0,
        [sys.executable, "-c", NOTEBOOK, CELL],
        env={"RAY_ADDRESS": RayCluster.address, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    said, complaints = process.communicate(timeout=240)
    assert process.returncode == 0, complaints
    for rank in range(4):
        assert f"hello from rank {rank}" in said
    (found,) = [line for line in said.splitlines() if line.startswith("found ")]
    names, networks, totals, places = zip(*json.loads(found.removeprefix("found ")))
    assert names == ("host0", "host0", "host1", "host1")
    assert (networks[0], networks[2]) == (networks[1], networks[3])
    assert networks[0] != networks[2]
    assert totals == ([1111.0] * 5,) * 4
    assert places == ([[0, 1], [2, 3]],) * 4
