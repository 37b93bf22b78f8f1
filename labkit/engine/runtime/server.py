"""The first import of Python's forkserver: it can set what torch reads only once."""

import atexit
import gc
import multiprocessing.forkserver
import os
import shutil
import sys
from typing import Any

_PID = os.getpid()

# A signal to the caller's group (a terminal that closes) ends the caller; the server cleans up.
os.setpgid(0, 0)
# OpenMP's threads spin while they wait, which takes the cores from other ranks.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# A module that asks for GPUs when it is imported must not initialize CUDA, which no fork could
# use afterwards: with this variable PyTorch asks NVML, the driver's monitor.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# Imported modules are no garbage; to look for some takes a fifth of the time of the imports.
gc.disable()


def _freeze() -> None:
    """Before the first fork: a page to which the collector writes is copied."""
    if os.getpid() == _PID and not gc.isenabled():
        gc.freeze()
        gc.enable()


def _end() -> None:
    """Remove the folder of sockets and stores, which a killed caller cannot remove, and end."""
    if os.getpid() != _PID:
        return
    server: Any = multiprocessing.forkserver._forkserver
    # After an error of its own (Python keeps it) its caller is there, and removes the folder.
    if server._forkserver_address and not hasattr(sys, "last_type"):
        shutil.rmtree(os.path.dirname(server._forkserver_address), ignore_errors=True)
    # To tear torch down takes a second, for which a kernel would wait.
    os._exit(0)


os.register_at_fork(before=_freeze)
atexit.register(_end)
