"""The last import of the forkserver: all ranks share what it has loaded by then.

A rank is a fork: a page of memory is copied when either process writes to it. Python's garbage
collection writes to every object it visits, except frozen ones. So a rank starts in about half the
processor time.
"""

import atexit
import contextlib
import gc
import multiprocessing.forkserver
from pathlib import Path
from typing import Any

_server: Any = multiprocessing.forkserver._forkserver


@atexit.register
def _remove_socket() -> None:
    """Remove the server's socket and its folder, which a parent that was killed could not.

    The server ends when no process is left that could ask it for another.
    """
    with contextlib.suppress(OSError, TypeError):
        socket = Path(_server._forkserver_address)
        socket.unlink()
        socket.parent.rmdir()


gc.collect()
gc.freeze()
gc.enable()
# Before the server's own end: some libraries report what is still frozen then as a leak.
atexit.register(gc.unfreeze)
