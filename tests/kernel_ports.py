"""Ports that no other process gets while a notebook's kernel starts.

jupyter_client chooses five ports from those that the system also gives to connections (on Linux
from 32768), and the kernel binds them a second later. If the system has given one of them to a
test's rank meanwhile, the kernel ends, or, if it was the port of iopub, never answers.
"""

import random
import socket

from jupyter_client.connect import LocalPortCache


def install():
    """Let this process start kernels only at ports that the system does not give to others."""
    LocalPortCache.find_available_port = lambda self, ip: free_port(ip)


def free_port(ip="127.0.0.1"):
    """A port below those that the system gives out, at which no process listens."""
    while True:
        port = random.randrange(10_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind((ip, port))
            except OSError:
                continue
        return port
