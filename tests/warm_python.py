"""A Python that starts in a tenth of a second with torch imported: a fork of one that has it.

Hundreds of the tests' processes (agents of torchrun and their ranks, what kernels are forked
from) import torch, for three seconds each, but how they start is not what is tested.
``command()`` is a program to start instead of ``sys.executable``. It asks a server, which the test
session has started, for a fork that becomes the process: with the same words, environment,
folder, open files and signal mask. Signals and the exit status are passed on. labkit itself is
not imported beforehand: each process does that as it would.

What it cannot pass on (unknown flags of Python; variables that are read when torch is loaded)
is started by the real Python.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys

# The variable with the server's folder.
VARIABLE = "TESTS_WARM_PYTHON"
PRELOAD = (
    "multiprocessing.forkserver", "multiprocessing.resource_tracker", "multiprocessing.spawn",
    "torch", "torch._dynamo", "torch.distributed.run", "torch.distributed.elastic.rendezvous",
    "safetensors.torch", "cloudpickle", "ipykernel.kernelapp", "ipykernel.ipkernel",
)  # fmt: skip
# What reads these variables has read them already; PASSED_ON become true of the fork.
READ_AT_LOAD = ("GOMP_", "KMP_", "MKL_", "LD_", "MALLOC_", "TORCH_LOGS", "TORCHDYNAMO_")
READ_AT_LOAD += ("OMP_WAIT_POLICY", "PYTHON", "LABKIT_PRETEND_GPUS", "CUDA_")
PASSED_ON = {"PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONBREAKPOINT"}
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def read_at_load() -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name.startswith(READ_AT_LOAD)}
    return {name: value for name, value in found.items() if name not in PASSED_ON}


# The program that is started.


def parse(words: list[str]) -> tuple[str, str, list[str]] | None:
    """(kind, code or module or script, arguments); None for what a fork cannot become."""
    words = list(words)
    while words:
        word = words.pop(0)
        if word in ("-c", "-m"):
            return (word, words[0], words[1:]) if words else None
        if not word.startswith("-"):
            return "script", word, words
        if word == "-X":
            word += words.pop(0)
        # The server has the same warnings from its environment.
        is_warning = word[:2] == "-W" and word[2:] in os.environ["PYTHONWARNINGS"].split(",")
        is_meant = word in ("-u", "-B") or word.startswith("-Xfrozen_modules")
        if not is_meant and not is_warning:
            return None
    return None


def be_client(words: list[str]) -> None:
    """Stand for the fork: pass on signals, and end as it ends."""
    folder, connection = os.environ[VARIABLE], socket.socket(socket.AF_UNIX)
    what = parse(words)
    try:
        connection.connect(f"{folder}/socket")
        with open(f"{folder}/variables") as file:
            is_the_same = json.load(file) == read_at_load()
    except OSError:
        is_the_same = False
    if what is None or not is_the_same:
        real = os.environ[f"{VARIABLE}_REAL"]
        os.execv(real, [real, *words])
    fds = [fd for fd in open_files() if fd != connection.fileno()]
    request = {"what": what, "environment": dict(os.environ), "folder": os.getcwd(), "fds": fds}
    request["mask"] = [int(one) for one in signal.pthread_sigmask(signal.SIG_BLOCK, [])]
    request["ignores"] = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    request["leads_session"] = os.getsid(0) == os.getpid()
    with os.fdopen(os.memfd_create("request"), "w") as note:
        json.dump(request, note)
        note.flush()
        socket.send_fds(connection, [b"!"], [note.fileno(), *fds])
    try:
        pid = number_from(connection)
        for number in FORWARDED:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        # Who waits for the other end of a pipe must not wait for this process.
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in fds:
            os.dup2(nothing, fd)
        status = number_from(connection)
    except OSError:
        os._exit(1)  # and the fork has ended with the server
    if os.WIFSIGNALED(status):
        end_by(os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


def end_by(number: int) -> None:
    with contextlib.suppress(OSError):  # of SIGKILL nothing can be set
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


def open_files() -> list[int]:
    found = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # the one of the list itself
            os.fstat(fd)
            found.append(fd)
    return found


def number_from(connection: socket.socket) -> int:
    if not (data := connection.recv(8)):
        raise ConnectionError("the server has ended")
    return int.from_bytes(data, "little")


# The server


def serve(folder: str) -> dict:
    """Fork for each client. Returns in a fork alone, with what it is to become.

    It ends with the process that has started it, as its standard input then ends.
    """
    import gc
    import importlib

    listener = socket.socket(socket.AF_UNIX)
    try:
        with open(f"{folder}/variables", "w") as file:
            json.dump(read_at_load(), file)
        listener.bind(f"{folder}/socket")
    except FileNotFoundError:
        # A session that has ended meanwhile has removed its folder.
        os._exit(0)
    listener.listen(128)
    # It imports nothing until it is first asked.
    while 0 not in select.select([listener, 0], [], [])[0]:
        connection, _ = listener.accept()
        if "torch" not in sys.modules:
            gc.disable()
            for name in PRELOAD:
                importlib.import_module(name)
            gc.collect()
            gc.freeze()
            # What a fork starts as a new Python (its forkserver, torchrun's ranks) is one, too.
            sys.executable = command()
            sys.modules["multiprocessing.spawn"].set_executable(sys.executable)
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for who waits
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            return fork_for(connection)
        connection.close()
    os._exit(0)


def fork_for(connection: socket.socket) -> dict:
    """Fork what the client asks for, where this returns; and wait until it or the client ends."""
    try:
        _, (note, *received), *_ = socket.recv_fds(connection, 1, 200)
    except (OSError, ValueError):
        os._exit(0)  # it asks for nothing, or was killed meanwhile
    os.lseek(note, 0, os.SEEK_SET)
    with os.fdopen(note) as file:
        request = json.load(file)
    if (pid := os.fork()) == 0:
        return request | {"received": received}
    for fd in received:
        os.close(fd)
    ended = os.pidfd_open(pid)
    with contextlib.suppress(OSError):
        connection.sendall(pid.to_bytes(8, "little"))
    if ended not in select.select([ended, connection, 0], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):
        connection.sendall(status.to_bytes(8, "little"))
    os._exit(0)


def settle(request: dict) -> None:
    """In the fork: files, environment, folder and signals become those of the request."""
    import fcntl
    import gc

    os.setsid() if request["leads_session"] else os.setpgid(0, 0)
    top = max(*open_files(), *request["fds"]) + 1
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD, top) for fd in request["received"]]
    os.closerange(0, top)
    for fd, number in zip(high, request["fds"]):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    handler = signal.SIG_IGN if request["ignores"] else signal.default_int_handler
    signal.signal(signal.SIGINT, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["mask"])
    # The old ones know of other files, in which they could seek.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", 1, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    if threads := os.environ.get("OMP_NUM_THREADS"):
        sys.modules["torch"].set_num_threads(int(threads))
    gc.enable()


def become(request: dict, path: list[str]) -> None:
    """Run the code, module or script as the process's main module."""
    import runpy
    import types

    kind, what, arguments = request["what"]
    scripts_folder = os.path.dirname(os.path.realpath(what))
    first = {"-c": "", "-m": os.getcwd(), "script": scripts_folder}[kind]
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


def live(request: dict, path: list[str]) -> None:
    """The rest of the fork's life, without tearing the interpreter down, which takes seconds."""
    import atexit
    import threading

    code, interrupted = 0, False
    try:
        settle(request)
        become(request, path)
    except SystemExit as leave:
        code = leave.code if isinstance(leave.code, int) else int(leave.code is not None)
        if isinstance(leave.code, str):
            print(leave.code, file=sys.stderr)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if interrupted:
        end_by(signal.SIGINT)
    os._exit(code & 0xFF)


# In the test session


def start(folder) -> None:
    """Start the server. Sets the variables."""
    import subprocess

    # With GPUs, also pretended ones, each process loads torch itself.
    if not sys.platform.startswith("linux") or "LABKIT_TEST_GPUS" in os.environ:
        return
    if "LABKIT_PRETEND_GPUS" in os.environ:
        return
    command = folder / "python"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{__file__}" client "$@"\n')
    command.chmod(0o755)
    os.environ[VARIABLE], os.environ[f"{VARIABLE}_REAL"] = str(folder), sys.executable
    words = [sys.executable, __file__, "serve", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    # It ends when this process does, and with it the pipe.
    start.server = subprocess.Popen(
        words, stdin=subprocess.PIPE, env=environment, start_new_session=True
    )


def command() -> str:
    """The program to start in place of ``sys.executable``."""
    folder = os.environ.get(VARIABLE)
    return f"{folder}/python" if folder else sys.executable


if __name__ == "__main__":
    if sys.argv[1] == "client":
        be_client(sys.argv[2:])
    _path = sys.path[1:]
    live(serve(sys.argv[2]), _path)
