"""Several TensorFlow processes on this machine, which start and end with one command.

The process of the command is the first task of the cluster. It starts the others with the same
script, and TensorFlow finds in the variable ``TF_CONFIG`` who is where. Nothing of TensorFlow is
imported here, so that all processes can load it at the same time.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading

from experiment import sent_bytes

HOST = "127.0.0.1"


def start(**tasks):
    """Start the processes of a cluster, such as ``start(chief=1, worker=2)``.

    Returns:
        `Others` in the process of the command, `First` in those that it starts.
    """
    # An interrupt ends a process also while it waits inside TensorFlow.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "TF_CONFIG" in os.environ:
        return First()
    reserved = [(job, _reserve()) for job, count in tasks.items() for _ in range(count)]
    cluster = {job: [] for job in tasks}
    for job, port in reserved:
        cluster[job].append(f"{HOST}:{port.getsockname()[1]}")
    first, *rest = [(job, index) for job in cluster for index in range(len(cluster[job]))]
    others = {f"{job} {index}": _start(cluster, job, index) for job, index in rest}
    os.environ["TF_CONFIG"] = _config(cluster, *first)
    return Others(others, reserved)


class Others:
    """The other processes: they end when this one does, and this one when one of them does.

    Each is joined to this one by a pair of sockets. However this process ends, also by a signal
    that cannot be caught, the kernel closes its socket, the other reads the end, and exits.
    """

    def __init__(self, processes, reserved):
        self._processes, self._reserved = processes, reserved
        self._over = False
        sys.excepthook = _end_at_once
        for name in processes:
            threading.Thread(target=self._watch, args=(name,), daemon=True).start()

    def sent_bytes(self):
        """{process: bytes that it has sent over TCP so far}."""
        for _, link in self._processes.values():
            link.sendall(b"?")
        return {name: int(link.recv(20)) for name, (_, link) in self._processes.items()}

    def finish(self):
        """Let the others end, once their work is done, too."""
        self._over = True
        for process, link in self._processes.values():
            link.sendall(b".")
            process.wait()

    def _watch(self, name):
        code = self._processes[name][0].wait()
        if not self._over:
            print(f"{name} ended with exit code {code}: the others end, too", file=sys.stderr)
            os._exit(1)


class First:
    """The process of the command, as one that it has started sees it."""

    def __init__(self):
        self._over = threading.Event()
        threading.Thread(target=self._answer, daemon=True).start()

    def finish(self):
        """End this process when the first one has finished, too."""
        self._over.wait()
        os._exit(0)

    def _answer(self):
        with socket.socket(fileno=os.dup(0)) as link:
            while asked := link.recv(1):
                if asked == b"?":
                    link.sendall(b"%d" % sent_bytes())
                else:
                    self._over.set()
        if not self._over.is_set():
            os._exit(1)


def _reserve():
    """A free port, bound, so that the kernel gives it to nobody who asks for any free one.

    TensorFlow, which asks for this very port, may bind it as well: this socket does not listen,
    and both allow that the address is used twice.
    """
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind((HOST, 0))
    return port


def _config(cluster, job, index):
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def _start(cluster, job, index):
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, *sys.argv],
            stdin=theirs,
            env={**os.environ, "TF_CONFIG": _config(cluster, job, index)},
        )
    return process, ours


def _end_at_once(*error):
    """TensorFlow's own clean-up would wait for processes that wait for this one."""
    sys.__excepthook__(*error)
    os._exit(1)
