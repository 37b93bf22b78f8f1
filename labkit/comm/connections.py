"""The connections that a process group has opened, as the operating system knows them.

gloo can neither interrupt a wait nor notice that a peer's machine is gone: without an answer it
waits until its timeout. Both can be had from the system. A connection that is shut down lets every
wait on it raise, and with keep-alive the system itself asks an idle peer for a sign of life: a
peer's kernel answers as long as it runs and can be reached, however busy its processes are.

Source: tcp(7), TCP_KEEPIDLE to TCP_USER_TIMEOUT; proc(5), /proc/PID/fd.
"""

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_DESCRIPTORS = "/proc/self/fd"
_ESTABLISHED = 1
# After 3 s without a byte a question each second; three without an answer end the connection. So
# does anything sent that is not acknowledged in 6 s.
_KEEP_ALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 6000}


class Connection(NamedTuple):
    """An open socket of this process: its descriptor, and what that leads to."""

    descriptor: int
    target: str

    @contextlib.contextmanager
    def opened(self) -> Iterator[socket.socket | None]:
        """A second handle of it; None if it is no TCP connection, or has been closed."""
        with contextlib.ExitStack() as stack:
            handle, is_it, state = None, False, 0
            try:
                # First a handle, then the check: the number may be given to another file.
                handle = stack.enter_context(socket.socket(fileno=os.dup(self.descriptor)))
                is_it = os.readlink(f"{_DESCRIPTORS}/{handle.fileno()}") == self.target
                # The first byte of tcp_info is the state. (SO_ERROR would take gloo's error away.)
                state = handle.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
            except OSError:
                is_it = False
            yield handle if is_it and state == _ESTABLISHED else None


def _open_sockets() -> set[Connection]:
    """All sockets of this process; none where the system does not list them."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                found.add(Connection(int(name), os.readlink(f"{_DESCRIPTORS}/{name}")))
    return {one for one in found if one.target.startswith("socket:")}


@contextlib.contextmanager
def new_connections() -> Iterator[list[Connection]]:
    """The TCP connections that are opened within the block, known after it; kept alive."""
    before, found = _open_sockets(), list[Connection]()
    yield found
    for connection in _open_sockets() - before:
        with connection.opened() as handle, contextlib.suppress(OSError):
            if handle is not None:
                found.append(connection)
                handle.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for name, value in _KEEP_ALIVE.items():
                    handle.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def cut(connections: Sequence[Connection]) -> None:
    """End what the connections bring: whoever waits for a message on one of them gets an error.

    Only that direction: gloo forgets the waits on a message that it could not write.
    """
    for connection in connections:
        with connection.opened() as handle, contextlib.suppress(OSError):
            if handle is not None:
                handle.shutdown(socket.SHUT_RD)
