"""Ports that nobody else is given while a notebook's kernel starts.

jupyter_client chooses five ports from those that the system also gives to connections (on Linux
from 32768), and the kernel binds them a second later. Where a test's ranks were given one
meanwhile, the kernel ends; if it was iopub's, it lives on and never answers.
"""

import random
import socket

from jupyter_client.connect import LocalPortCache


def install():
    """From now on this process starts kernels at ports that the system gives to nobody."""
    LocalPortCache.find_available_port = lambda self, ip: free_port(ip)


def free_port(ip="127.0.0.1"):
    """A port below the system's own that nobody listens at."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind((ip, port))
            except OSError:
                continue
        return port
