"""A Python that starts in a tenth of a second with torch imported: a fork of one that has it.

Hundreds of the tests' processes (agents of torchrun and their ranks, the kernels of notebooks and
their forkservers) import torch, for three seconds each, but how they start is not what is tested.
``command()`` is a program to start instead of ``sys.executable``. It asks a server, which the test
session has started, for a fork that becomes the process: with the same words, environment,
folder, open files and signal mask. Signals and the exit status are passed on. labkit itself is
not imported beforehand: each process does that as it would.

What it cannot pass on (unknown flags of Python; variables that are read when torch is loaded)
is started by the real Python.
"""

import array
import contextlib
import json
import os
import signal
import socket
import struct
import sys

# The variable with the server's folder.
VARIABLE = "TESTS_WARM_PYTHON"
PRELOAD = (
    "multiprocessing.forkserver", "multiprocessing.resource_tracker", "multiprocessing.spawn",
    "torch", "torch._dynamo", "torch.distributed.run", "torch.distributed.elastic.rendezvous",
    "safetensors.torch", "cloudpickle", "ipykernel.kernelapp", "ipykernel.ipkernel",
)  # fmt: skip
# What reads these variables has read them already.
READ_AT_LOAD = ("GOMP_", "KMP_", "MKL_", "LD_", "MALLOC_", "TORCH_LOGS", "TORCHDYNAMO_")
READ_AT_LOAD += ("OMP_WAIT_POLICY", "PYTHON", "LABKIT_PRETEND_GPUS", "CUDA_")
# With GPUs, also pretended ones, each process loads torch itself.
READ_AT_LOAD_ELSEWHERE = {"LABKIT_PRETEND_GPUS", "LABKIT_TEST_GPUS"}
# ... but not these, which become true of the fork.
PASSED_ON = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONBREAKPOINT"}
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def read_at_load(environment) -> dict[str, str]:
    found = {name: environment[name] for name in environment if name.startswith(READ_AT_LOAD)}
    return {name: value for name, value in found.items() if name not in PASSED_ON}


# The program that is started.


def parse(words: list[str]) -> tuple[str, str, list[str]] | None:
    """(kind, code or module or script, arguments); None for what a fork cannot become."""
    words = list(words)
    while words:
        word = words.pop(0)
        if word in ("-c", "-m"):
            return (word, words[0], words[1:]) if words else None
        if word == "-u":
            os.environ["PYTHONUNBUFFERED"] = "1"
        elif word == "-B":
            sys.dont_write_bytecode = True
        elif word.startswith("-W"):
            # The server has the same ones from its environment.
            if word[2:] not in os.environ.get("PYTHONWARNINGS", "").split(","):
                return None
        elif word == "-X" or word.startswith("-Xfrozen_modules"):
            if word == "-X" and not words.pop(0).startswith("frozen_modules"):
                return None
        elif word.startswith("-"):
            return None
        else:
            return "script", word, words
    return None


def be_client(words: list[str]) -> None:
    """Stand for the fork: pass on signals, and end as it ends."""
    what, folder = parse(words), os.environ.get(VARIABLE, "")
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(f"{folder}/socket")
        with open(f"{folder}/variables") as file:
            at_load = json.load(file)
    except OSError:
        what = None
    if what is None or read_at_load(os.environ) != at_load:
        real = os.environ.get(f"{VARIABLE}_REAL", sys.executable)
        os.execv(real, [real, *words])
    fds = ask(connection, what)
    pid = _number(connection)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    # Who waits for the other end of a pipe must not wait for this process.
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(nothing, fd)
    status = _number(connection)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        signal.signal(number, signal.SIG_DFL) if number != signal.SIGKILL else None
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def ask(connection: socket.socket, what: tuple[str, str, list[str]]) -> list[int]:
    """Send what the fork is to become, with all that this process has. Returns its open files."""
    held = {connection.fileno()}
    fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd not in held and _is_open(fd)]
    body = {"what": what, "environment": dict(os.environ), "folder": os.getcwd(), "fds": fds}
    body["mask"] = [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    body["is_ignored"] = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    body["leads_session"] = os.getsid(0) == os.getpid()
    data = json.dumps(body).encode()
    sent = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
    connection.sendmsg([struct.pack("q", len(data))], sent)
    connection.sendall(data)
    return fds


def _number(connection: socket.socket) -> int:
    """The server's next number; without one this process ends, as the server has."""
    try:
        return struct.unpack("q", _read(connection, 8))[0]
    except OSError:
        os._exit(1)


def _is_open(fd: int) -> bool:
    try:
        return bool(os.fstat(fd))
    except OSError:
        return False


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        if not (more := connection.recv(count - len(data))):
            raise ConnectionError("the other end is closed")
        data += more
    return data


# The server


class Server:
    """Forks; ends with the process that has started it, as its standard input then ends."""

    def __init__(self, folder: str):
        import selectors

        self.listener = socket.socket(socket.AF_UNIX)
        with open(f"{folder}/variables", "w") as file:
            json.dump(read_at_load(os.environ), file)
        self.listener.bind(f"{folder}/socket")
        self.listener.listen(128)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.listener, selectors.EVENT_READ)
        self.selector.register(0, selectors.EVENT_READ)
        self.children: dict[int, socket.socket] = {}
        self.is_ready = False

    def serve(self) -> dict:
        """Returns in a fork alone, with what it is to become."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj == 0:
                    self._end()
                elif key.fileobj is self.listener:
                    connection, _ = self.listener.accept()
                    if (request := self._received(connection)) is not None and self._fork(
                        connection, request
                    ):
                        return request
                elif isinstance(key.data, int):
                    self._has_ended(key.fileobj, key.data)
                else:
                    self._is_forsaken(key.fileobj)

    def _import(self) -> None:
        import gc
        import importlib

        gc.disable()
        for name in PRELOAD:
            importlib.import_module(name)
        gc.collect()
        gc.freeze()
        import multiprocessing.spawn

        # What a fork starts as a new Python (its forkserver, an agent of torchrun) is a fork, too.
        sys.executable = command()
        multiprocessing.spawn.set_executable(sys.executable)
        self.is_ready = True

    def _received(self, connection: socket.socket) -> dict | None:
        """What is asked for; None from who asks for nothing, or was killed meanwhile."""
        size, fds = array.array("i").itemsize, array.array("i")
        try:
            head, extra, *_ = connection.recvmsg(8, socket.CMSG_LEN(200 * size))
            for _, _, data in extra:
                fds.frombytes(data[: len(data) - len(data) % size])
            if not head:
                raise ConnectionError("nothing is asked for")
            request = json.loads(_read(connection, struct.unpack("q", head)[0]))
        except (OSError, ValueError, struct.error):
            connection.close()
            for fd in fds:
                os.close(fd)
            return None
        return request | {"received": list(fds)}

    def _fork(self, connection: socket.socket, request: dict) -> bool:
        """Fork; returns whether this is the fork."""
        if not self.is_ready:
            self._import()
        pid = os.fork()
        if pid == 0:
            return True
        for fd in request["received"]:
            os.close(fd)
        self.children[pid] = connection
        self.selector.register(os.pidfd_open(pid), 1, pid)
        self.selector.register(connection, 1)
        # (If the other end is gone, the selector tells it, and the fork is killed.)
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("q", pid))
        return False

    def _has_ended(self, pidfd: int, pid: int) -> None:
        self.selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(pid, 0)
        connection = self.children.pop(pid)
        # (It is not registered any more, or closed, if the process was killed.)
        with contextlib.suppress(OSError, KeyError):
            self.selector.unregister(connection)
            connection.sendall(struct.pack("q", status))
        connection.close()

    def _is_forsaken(self, connection: socket.socket) -> None:
        """The process in whose place the fork is was killed: so is the fork."""
        self.selector.unregister(connection)
        for pid, other in self.children.items():
            if other is connection:
                os.kill(pid, signal.SIGKILL)

    def _end(self) -> None:
        for pid in self.children:
            os.kill(pid, signal.SIGKILL)
        os._exit(0)


def settle(request: dict) -> None:
    """In the fork: files, environment, folder and signals become those of the request."""
    import fcntl
    import gc
    import io

    os.setsid() if request["leads_session"] else os.setpgid(0, 0)
    wanted, top = request["fds"], max([64, *request["fds"]]) + 1
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, top) for fd in request["received"]]
    os.closerange(0, top)
    keep = {*high}
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd >= top and fd not in keep and _is_open(fd):
            os.close(fd)
    for fd, number in zip(high, wanted):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    signal.set_wakeup_fd(-1)
    handler = signal.SIG_IGN if request["is_ignored"] else signal.default_int_handler
    signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in ((1, "stdout"), (2, "stderr")):
        if number in wanted:
            raw = os.fdopen(number, "wb", buffering=0, closefd=False)
            binary = raw if at_once else io.BufferedWriter(raw)
            line = at_once or number == 2 or os.isatty(number)
            text = io.TextIOWrapper(
                binary,
                "utf-8",
                "backslashreplace" if number == 2 else None,
                line_buffering=line,
                write_through=at_once,
            )
        else:
            text = None
        setattr(sys, name, text)
        setattr(sys, f"__{name}__", text)
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False) if 0 in wanted else None
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    gc.enable()


def become(request: dict, path: list[str]) -> None:
    """Run the code, module or script as the process's main module."""
    import runpy
    import types

    kind, what, arguments = request["what"]
    first = {"-c": "", "-m": os.getcwd()}.get(kind) or os.path.dirname(os.path.realpath(what))
    first = "" if kind == "-c" else first
    added = [one for one in os.environ.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [first, *added, *path]
    sys.argv[:] = [what if kind == "script" else kind, *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = __builtins__
    if kind == "-m":
        runpy._run_module_as_main(what)
        return
    if kind == "script":
        main.__file__ = what
        with open(what, "rb") as file:
            code = compile(file.read(), what, "exec")
    else:
        code = compile(what, "<string>", "exec")
    exec(code, main.__dict__)


def end(error: BaseException | None) -> int:
    """Report what was not caught, without the frames of this file. Returns the exit code."""
    if error is None:
        return 0
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return (error.code or 0) & 0xFF
    if isinstance(error, SystemExit):
        print(error.code, file=sys.stderr)
        return 1
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def finish(code: int) -> None:
    """End without tearing the interpreter down, which takes as long as to import torch."""
    import atexit
    import threading

    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


# In the test session


def start(folder) -> None:
    """Start the server, which imports nothing until it is first asked. Sets the variables."""
    import subprocess

    if not sys.platform.startswith("linux") or READ_AT_LOAD_ELSEWHERE & {*os.environ}:
        return
    command = folder / "python"
    script = f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" client "$@"\n'
    command.write_text(script)
    command.chmod(0o755)
    os.environ[VARIABLE], os.environ[f"{VARIABLE}_REAL"] = str(folder), sys.executable
    words = [sys.executable, __file__, "serve", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # It ends when this process does, and with it the pipe.
    _started.append(
        subprocess.Popen(words, stdin=subprocess.PIPE, env=environment, start_new_session=True)
    )


_started: list = []


def command() -> str:
    """The program to start in place of ``sys.executable``."""
    folder = os.environ.get(VARIABLE)
    return f"{folder}/python" if folder else sys.executable


def for_kernels() -> None:
    """Let nbval start its kernels as forks."""
    import ipykernel.kernelspec as specs

    usual = specs.get_kernel_dict

    def forked(*args, **options):
        found = usual(*args, **options)
        return found | {"argv": [command(), *found["argv"][1:]]}

    specs.get_kernel_dict = forked


def write_kernel(folder) -> None:
    """Make a folder for JUPYTER_PATH, in which Python's kernel is a fork."""
    import shutil
    from pathlib import Path

    usual = Path(sys.prefix, "share", "jupyter", "kernels", "python3")
    spec = json.loads((usual / "kernel.json").read_text())
    spec["argv"][0] = command()
    shutil.copytree(usual, folder / "kernels" / "python3")
    (folder / "kernels" / "python3" / "kernel.json").write_text(json.dumps(spec))


if __name__ == "__main__":
    if sys.argv[1] == "client":
        be_client(sys.argv[2:])
    _path = sys.path[1:]
    _request = Server(sys.argv[2]).serve()
    settle(_request)
    _error = None
    try:
        become(_request, _path)
    except BaseException as _raised:
        _error = _raised
    finish(end(_error))
