"""A run on two hosts with a network between them: a cut cable is named.

That techniques train over hosts as on one device: tests/strategies/test_over_hosts.py.
"""

import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from two_hosts import ROOT, TwoHosts, why_not

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
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--rdzv-backend"]
    words += ["c10d", "--rdzv-endpoint", "host0:29500", "--nproc-per-node", "2"]
    words += [str(tmp_path / "program.py")]
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    options |= {"stderr": subprocess.STDOUT}
    options["env"] = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    said = ""
    with TwoHosts() as hosts:
        agent, _ = [hosts.popen(host, words, **options) for host in (0, 1)]
        too_late = threading.Timer(180, os.killpg, (agent.pid, signal.SIGKILL))
        too_late.start()
        for line in agent.stdout:
            said += line
            if line.startswith("endless"):
                hosts.run(1, "ip", "link", "set", "cable", "down")
            # Named are the ranks that had given up when the loss was explained: one, or both.
            if re.match(r"  rank [01] \(host 0\) was waiting at", line):
                break
        too_late.cancel()
    assert "labkit: rank 2 (host 1) and rank 3 (host 1) cannot be reached" in said, said
    assert re.search(r"  rank [01] \(host 0\) was waiting at .*program.py, line", said), said
