"""Which ranks each host gets, and where they find each other: a store that the driver keeps.

PyTorch's TCPStore has no password. It holds addresses of gloo and NCCL, as plain data, and it
listens on the one address through which the cluster's nodes reach the host, on a free port.
"""

import fcntl
import socket
import struct
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch.distributed as dist

from labkit.units import format_count

_PATIENCE = timedelta(seconds=60)
# ioctl(2): the address of an interface. The number is Linux's.
_GET_ADDRESS = 0x8915


@dataclass(frozen=True)
class MeetingStore:
    """The store's address, as the ranks get it."""

    address: str
    port: int

    def store(self, world_size: int) -> dist.TCPStore:
        """Connect to the store; to be called once per rank."""
        return dist.TCPStore(self.address, self.port, is_master=False, timeout=_PATIENCE)


def serve_store(address: str) -> dist.TCPStore:
    """A store that listens on ``address`` alone, on a free port (``.port``), until it is deleted.

    Raises:
        OSError: this machine does not have the address.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(128)
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_PATIENCE,
        # The store closes it.
        master_listen_fd=listener.detach(),
    )


def interface_of(address: str) -> str:
    """The name of the network interface that has this IPv4 address; empty if none is found."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            asked = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, asked)
            except OSError:
                continue  # it has no IPv4 address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def spread(world_size: int, num_hosts: int) -> list[range]:
    """The ranks of each host, numbered host by host, as evenly as possible: 5 on 2 are 3 and 2.

    Raises:
        ValueError: more hosts than ranks.
    """
    if num_hosts > world_size:
        raise ValueError(
            f"{format_count(num_hosts, 'host')} for {format_count(world_size, 'rank')}: each host "
            f"needs at least one rank, so use hosts={world_size}, or a larger world_size"
        )
    each, more = divmod(world_size, num_hosts)
    starts = [host * each + min(host, more) for host in range(num_hosts + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
