"""Ports that no other process gets while a notebook's kernel starts.

jupyter_client chooses five ports from those that the system also gives to connections (on Linux
from 32768), and the kernel binds them a second later. If another process, or the same kernel, has
one of them meanwhile, the kernel ends, or never answers.
"""

import itertools
import os
import random
import socket

from jupyter_client.connect import LocalPortCache

# Each of pytest's workers counts through its own ports, so that none is given twice.
# (Not 10080, which browsers refuse.)
_FIRST, _PER_WORKER = 11_000, 2_000
_COUNT = itertools.count(random.randrange(_PER_WORKER))


def install():
    """Let this process start kernels only at ports that the system does not give to others."""
    LocalPortCache.find_available_port = lambda self, ip: free_port(ip)


def free_port(ip="127.0.0.1"):
    """A port below those that the system gives out, at which no process listens."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    while True:
        port = _FIRST + worker * _PER_WORKER + next(_COUNT) % _PER_WORKER
        with socket.socket() as probe:
            try:
                probe.bind((ip, port))
            except OSError:
                continue
        return port
