"""A run on two hosts with a network between them: a cut cable is named.

That techniques train over hosts as on one device: tests/strategies/test_over_hosts.py.
"""

import pytest
from two_hosts import Torchrun, TwoHosts, why_not

PROGRAM = """
import torch, labkit
from labkit.collectives import ring_all_reduce

def endless(comm):
    for step in range(10**9):
        ring_all_reduce(comm, torch.ones(1000))
        if step == 3 and comm.rank == 0:
            print("endless", flush=True)

labkit.run(endless, world_size=4)
"""


@pytest.mark.slow
def test_a_cut_cable_names_the_lost_host(tmp_path):
    if missing := why_not():
        pytest.skip(missing)
    (tmp_path / "program.py").write_text(PROGRAM)
    with TwoHosts() as hosts:
        job = Torchrun(hosts, 2, [str(tmp_path / "program.py")], 29500)
        job.line("endless")
        hosts.run(1, "ip", "link", "set", "cable", "down")
        job.line("labkit: rank 2 (host 1) and rank 3 (host 1) cannot be reached", timeout_s=60)
        assert "program.py, line" in job.line("  rank 0 (host 0) was waiting at")
