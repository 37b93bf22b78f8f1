"""The real rate of the cable: one plain TCP connection, without PyTorch."""

import json
import subprocess
import sys
from typing import Any

from workbook.measure.two_hosts.hosts import ADDRESSES, TwoHosts

# A transfer lasts so many seconds. The first of them do not count: TCP finds its window in them,
# and what was in the filter's bucket is spent.
_SECONDS, _WARM_S = 0.6, 0.1

# Host 0 listens, says at which port, and counts what arrives.
_RECEIVE = """
import json, socket, sys, time
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    server.settimeout(20)
    connection, _ = server.accept()
buffer, num_bytes, start_s = bytearray(1 << 20), 0, None
with connection:
    first_s = time.perf_counter()
    while count := connection.recv_into(buffer):
        now_s = time.perf_counter()
        if now_s - first_s < float(sys.argv[2]) or start_s is None:
            start_s = now_s
        else:
            num_bytes += count
print(json.dumps({"bytes": num_bytes, "seconds": now_s - start_s}))
"""
_SEND = """
import socket, sys, time
block, start_s = bytes(1 << 18), time.perf_counter()
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=20) as connection:
    while time.perf_counter() - start_s < float(sys.argv[3]):
        connection.sendall(block)
"""


def raw_bytes_per_s(hosts: TwoHosts) -> float:
    """Bytes per second of one TCP connection from host 1 to host 0, at the present rate."""
    python = [sys.executable, "-I", "-S", "-c"]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    receive = [*python, _RECEIVE, ADDRESSES[0], str(_WARM_S)]
    with hosts.popen(0, receive, **pipes) as receiver:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        hosts.run(1, *python, _SEND, ADDRESSES[0], port, str(_SECONDS))
        counted = json.loads(receiver.stdout.read())
    return counted["bytes"] / counted["seconds"]
