"""Several TensorFlow processes on this machine, which start and end with one command."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time

from experiment import Measured, sent_bytes

HOST = "127.0.0.1"
NAMES = {"chief": "coordinator", "ps": "server"}


def start(**tasks):
    """Make a process of each task of a cluster, such as ``start(chief=1, worker=2)``.

    From here on all of them execute the script: this one as the first task, the others as its
    copies, which need not load TensorFlow again. TensorFlow may be imported before, but not used.
    It finds in the variable ``TF_CONFIG`` who is where.

    Returns:
        `Others` in the first process, `First` in the others.
    """
    # An interrupt ends a process also while it waits inside TensorFlow.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.update(no_grpc_proxy=HOST)  # where a proxy is set for what is outside
    reserved = [(job, _reserve()) for job, count in tasks.items() for _ in range(count)]
    cluster = {job: [] for job in tasks}
    for job, port in reserved:
        cluster[job].append(f"{HOST}:{port.getsockname()[1]}")
    first, *rest = [(job, index) for job in cluster for index in range(len(cluster[job]))]
    copies = {}
    for task in rest:
        ours, theirs = socket.socketpair()
        process = os.fork()
        if not process:
            # Only the first process may hold its ends: so they close with it.
            for link in [ours, *(link for _, link in copies.values())]:
                link.close()
            _set_task(cluster, *task)
            return First(theirs)
        theirs.close()
        copies[_name(*task)] = process, ours
    _set_task(cluster, *first)
    return Others(_name(*first), copies, reserved)


class Others:
    """The other processes: they end when this one does, and this one when one of them does.

    Each is joined to this one by a pair of sockets. However this process ends, also by a signal
    that cannot be caught, the kernel closes its socket, the other reads the end, and exits.
    """

    def __init__(self, own_name, processes, reserved):
        self._own_name, self._processes, self._reserved = own_name, processes, reserved
        self._over = False
        self._watching = {
            name: threading.Thread(target=self._watch, args=(name,), daemon=True)
            for name in processes
        }
        for thread in self._watching.values():
            thread.start()

    def sent_bytes(self):
        """{process: bytes that it has sent over TCP so far}, of this process and all others."""
        return {self._own_name: sent_bytes()} | {name: self._ask(name) for name in self._processes}

    def finish(self):
        """End all processes, once the work of the others is done, too."""
        self._over = True
        for name, (_, link) in self._processes.items():
            with contextlib.suppress(OSError):  # it has ended: the next line finds out
                link.sendall(b".")
            self._watching[name].join()
        # At once: TensorFlow would look for the others.
        os._exit(0)

    def _ask(self, name):
        _, link = self._processes[name]
        try:
            link.sendall(b"?")
            return int(link.recv(20))
        except (OSError, ValueError):  # it has ended, which the other thread tells
            self._watching[name].join()

    def _watch(self, name):
        _, status = os.waitpid(self._processes[name][0], 0)
        code = os.waitstatus_to_exitcode(status)
        if code or not self._over:
            print(f"{name} ended with {code}: all processes end", file=sys.stderr, flush=True)
            os._exit(1)


class First:
    """The process of the command, as the others see it."""

    def __init__(self, link):
        self._link = link
        self._over = threading.Event()
        threading.Thread(target=self._answer, daemon=True).start()

    def finish(self):
        """End this process when the first one has finished, too."""
        self._over.wait()
        os._exit(0)

    def _answer(self):
        while asked := self._link.recv(1):
            if asked == b"?":
                self._link.sendall(b"%d" % sent_bytes())
            else:
                self._over.set()
        os._exit(1)


class MeasuredByAll(Measured):
    """``Measured``, with the bytes of all processes: ``{process: bytes of every step}``."""

    def __init__(self, others):
        super().__init__()
        self._others, self.sent_bytes = others, {}

    def __enter__(self):
        self._before = self._others.sent_bytes()
        self._start_s = time.perf_counter()
        return self

    def __exit__(self, kind, error, trace):
        self.step_s.append(time.perf_counter() - self._start_s)
        for name, sent in self._others.sent_bytes().items():
            self.sent_bytes.setdefault(name, []).append(sent - self._before[name])


def _reserve():
    """A free port, bound, so that the kernel gives it to nobody who asks for any free one.

    TensorFlow, which asks for this very port, may bind it as well: this socket does not listen,
    and both allow that the address is used twice.
    """
    port = socket.socket()
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    port.bind((HOST, 0))
    return port


def _set_task(cluster, job, index):
    task = {"type": job, "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})


def _name(job, index):
    return NAMES.get(job, f"{job} {index}")
