"""The real rate of the cable: one plain TCP connection, without PyTorch."""

import json
import subprocess
import sys
from typing import Any

from labkit.bench.two_hosts.hosts import ADDRESSES, TwoHosts

# A transfer ends after so many seconds, or so many bytes.
_SECONDS, _BYTES = 0.5, 1 << 30

# Host 0 listens and says at which port; it counts what arrives, from the first byte to the last,
# after a first part in which TCP and the bucket get into their stride.
_RECEIVE = """
import json, socket, sys, time
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    server.settimeout(20)
    connection, _ = server.accept()
buffer, num_bytes, start_s, warm = bytearray(1 << 20), 0, None, int(sys.argv[2])
with connection:
    while count := connection.recv_into(buffer):
        now_s = time.perf_counter()
        if warm > 0:
            warm -= count
            start_s = now_s
        else:
            num_bytes += count
print(json.dumps({"bytes": num_bytes, "seconds": now_s - start_s}))
"""
_SEND = """
import socket, sys, time
host, port, seconds, most = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
block, sent, start_s = bytes(1 << 20), 0, time.perf_counter()
with socket.create_connection((host, port), timeout=20) as connection:
    while sent < most and time.perf_counter() - start_s < seconds:
        connection.sendall(block)
        sent += len(block)
"""
_WARM_BYTES = 4 << 20


def raw_bytes_per_s(hosts: TwoHosts) -> float:
    """Bytes per second of one TCP connection from host 1 to host 0, at the present rate."""
    python = [sys.executable, "-I", "-S", "-c"]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    receive = [*python, _RECEIVE, ADDRESSES[0], str(_WARM_BYTES)]
    with hosts.popen(0, receive, **pipes) as receiver:
        assert receiver.stdout is not None
        port = receiver.stdout.readline().strip()
        hosts.run(1, *python, _SEND, ADDRESSES[0], port, str(_SECONDS), str(_BYTES))
        counted = json.loads(receiver.stdout.read())
    return counted["bytes"] / counted["seconds"]
