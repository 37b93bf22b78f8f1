"""The last import of the forkserver: what it has loaded by then, all ranks share.

A rank is a fork: a page of memory is copied when one of the two writes to it. Python's garbage
collection writes to every object it looks at, and it leaves alone what is frozen. With this, a
rank starts in about half the processor time.
"""

import atexit
import contextlib
import gc
from multiprocessing.forkserver import _forkserver
from pathlib import Path


@atexit.register
def _remove_socket() -> None:
    """The server's socket and its folder: a parent that was killed could not remove them.

    The server ends when nobody is left who could ask it for a process.
    """
    with contextlib.suppress(OSError, TypeError):
        socket = Path(_forkserver._forkserver_address)
        socket.unlink()
        socket.parent.rmdir()


gc.collect()
gc.freeze()
# The server's own end is an ordinary one: some libraries call what is still frozen then a leak.
atexit.register(gc.unfreeze)
