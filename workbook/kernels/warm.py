"""The warm process: it imports what pages use, and forks a kernel whenever Jupyter asks for one.

Its socket pair comes from Jupyter's process, with which it ends. With a request come four open
files: a connection of the kernel's own, its stdin, stdout and stderr.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time

import numpy as np
import torch

import workbook  # noqa: F401, appends to what ranks find imported
from labkit.engine.runtime import preload
from workbook.kernels.provisioner import GO, LAUNCHER

# Imported beside what ranks need: what pages import first, and what shows their runs.
FOR_KERNELS = ["ipykernel.kernelapp", "ipykernel.zmqshell", "workbook.notebook.live"]
FOR_KERNELS += ["workbook.plots", "workbook.widgets"]


def main(fd: int) -> None:
    """Import, then fork for each request on the socket ``fd``, until its other end is closed."""
    channel = socket.socket(fileno=fd)
    started_ns = time.time_ns()
    # Ctrl-C is for Jupyter; nobody waits for the forks here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.disable()
    # The first import of a server is for its process alone.
    for name in [*preload.FOR_RANKS[1:], *preload.FOR_TRAINING, *FOR_KERNELS]:
        importlib.import_module(name)
    # A fork ends the threads that OpenBLAS starts when it is loaded, until they are needed.
    if os.fork() == 0:
        os._exit(0)
    gc.freeze()
    gc.enable()
    while True:
        _, files, *_ = socket.recv_fds(channel, 1, 4)
        if not files:
            os._exit(0)
        if reason := why_not(started_ns):
            print(f"A kernel starts as a new process: {reason}.", file=sys.stderr)
            os._exit(0)
        if os.fork() == 0:
            channel.close()
            try:
                _live(socket.socket(fileno=files[0]), files[1:])
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
            finally:
                os._exit(0)
        for file in files:
            os.close(file)


def why_not(started_ns: int) -> str | None:
    """Return why this process, whose imports began then, can no longer fork kernels, or None."""
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path and os.path.exists(path) and os.stat(path).st_mtime_ns > started_ns:
            return f"{path} has changed since it was imported"
    if len(os.listdir("/proc/self/task")) > 1:
        return "the process with the imports has threads"
    return None


def _live(connection: socket.socket, streams: list[int]) -> None:
    """The life of a fork, to its end, without tearing down what was imported."""
    for number, file in enumerate(streams):
        os.dup2(file, number)
        os.close(file)
    with connection.makefile() as lines:
        request = json.loads(lines.readline())
    # As any kernel: signals to the group of Jupyter's terminal are not for this one.
    os.setsid()
    connection.send(str(os.getpid()).encode())
    if connection.recv(1) != GO:
        return
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.orig_argv[:] = request["command"]
    sys.argv[:] = sys.orig_argv[sys.orig_argv.index(LAUNCHER) :]
    # Where Python has it after -m. The launcher takes it out.
    sys.path.insert(0, os.getcwd())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    np.random.seed()
    torch.default_generator.seed()
    with contextlib.suppress(SystemExit):
        preload.fork_server()
        threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
        runpy.run_module(LAUNCHER, run_name="__main__", alter_sys=True)
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()


def _end_with(connection: socket.socket) -> None:
    """End this kernel with Jupyter's process, however that ends."""
    connection.recv(1)
    os._exit(1)
