"""The last import of the forkserver: freeze the objects that all ranks will share.

A rank is a fork of the server: a page of memory is copied when either process writes to it.
Python's garbage collection writes to every object it visits, except frozen ones. With frozen
objects a rank starts in about half the processor time.
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
    """Remove the server's socket and its folder, which a killed parent cannot remove.

    The server ends when no process is left that could ask it for a new rank.
    """
    with contextlib.suppress(OSError, TypeError):
        socket = Path(_server._forkserver_address)
        socket.unlink()
        socket.parent.rmdir()


gc.collect()
gc.freeze()
gc.enable()
# Unfreeze before the server exits: some libraries report objects that are still frozen as leaks.
atexit.register(gc.unfreeze)
