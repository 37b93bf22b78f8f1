"""The process that ranks are forked from: Python's forkserver, with torch imported already."""

import atexit
import contextlib
import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from labkit.engine.devices import plan, print_once
from labkit.engine.gpus import may_exist
from labkit.engine.started import GUARD, RANK_NAME, UNGUARDED, started_as_rank

# Modules that the forkserver imports before it forks ranks.
FOR_RANKS = ["labkit.engine.runtime.server", "labkit.engine.runtime.worker"]
# The first optimizer in a process imports torch._dynamo, which takes seconds in every rank.
FOR_TRAINING = ["torch._dynamo"]
# The module whose ``watcher`` draws the runs of a notebook, imported by the first of them. A
# package above labkit appends it.
IN_NOTEBOOKS: list[str] = []
# The longest temporary folder in which the paths of sockets (107 bytes) have their place.
_LONGEST_PATH = 107 - len("/pymp-12345678/listener-12345678")
_SHORT_FOLDER = "/tmp"
_have_folders: set[int] = set()  # process ids, of this process and those it was forked from
# Paths of a script are relative to it.
_STARTED_IN = os.getcwd()


def check_may_start() -> None:
    """Raise ValueError where Python lets a process start none.

    A rank of a script that is called without a guard ends here, in its import of the script.
    """
    process = multiprocessing.current_process()
    # Python sets it while a new process imports the script that has started it.
    if getattr(process, "_inheriting", False):
        if process.name.startswith(RANK_NAME):
            os._exit(UNGUARDED)
        raise ValueError(
            "labkit.run was called while a process that the script has started imports the "
            f"script: call it {GUARD}"
        )
    if process.daemon:
        raise ValueError(
            "labkit.run starts processes, and Python lets no daemonic process do so, such as this "
            f"one, {process.name}: call it in a process that is not daemonic. Those of a "
            "multiprocessing.Pool are, those of a ProcessPoolExecutor are not"
        )


def _prepare() -> None:
    """Let ranks start where this process is not as multiprocessing takes it to be."""
    main: Any = sys.modules["__main__"]
    # A debugger's main program has none.
    vars(main).setdefault("__spec__", None)
    # From ``python - < script.py`` each rank would run a file ``<stdin>``. (What the function
    # needs travels with it.)
    path = getattr(main, "__file__", None)
    if path and not os.path.exists(os.path.join(_STARTED_IN, path)):
        main.__file__ = None
    # The workers of joblib have one that ranks cannot find.
    method = multiprocessing.get_start_method(allow_none=True)
    if method not in (None, *multiprocessing.get_all_start_methods()):
        multiprocessing.set_start_method("forkserver", force=True)
    try:
        os.getcwd()
    except FileNotFoundError:
        raise FileNotFoundError(
            "the current folder has been removed, and ranks start in it: os.chdir to another first"
        ) from None
    # Where a daemon has closed its standard streams, sockets would get their numbers.
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def kernel() -> Any:
    """The IPython shell of a notebook's kernel, or None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell if hasattr(shell, "kernel") else None


def warm_up(*, device: str | None = None, world_size: int = 4, training: bool = True) -> None:
    """Start the process that all ranks are forked from, in the background; return at once.

    It needs some seconds to import torch; otherwise the first run starts it. With ``device`` this
    also says on stderr what a run of ``world_size`` ranks would, which later ones do not repeat:
    that ranks share a GPU, for example (ValueError for a device that is not there). Only a
    first call may import what ``training`` needs; otherwise every rank spends seconds on it.
    """
    check_may_start()
    if started_as_rank() is not None:
        return
    # Imported modules are no garbage; to look for some takes a fifth of the time of the imports.
    gc.set_threshold(50_000)
    names = list(FOR_RANKS)
    if training:
        names += FOR_TRAINING
    multiprocessing.forkserver.set_forkserver_preload(names)
    # Ctrl-C and the stop button signal the whole process group, and would end a server that still
    # imports. It inherits this thread's signal mask; the resource tracker unblocks the signal when
    # it starts, so it has to be there before.
    _prepare()
    with interrupts_later():
        _make_folder()
        multiprocessing.resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    shell = kernel()
    if shell is not None:
        shell.observe(_end, "exit_now")
    # Without a driver auto has nothing to say, and to import torch would take seconds.
    if device and (device != "auto" or may_exist()):
        print_once(plan(world_size, device).note)


def fork_server() -> None:
    """Do as ``warm_up``, by forks: for a process without threads that has the imports already."""
    global _STARTED_IN
    _STARTED_IN = os.getcwd()
    start_python = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = _fork
    try:
        warm_up()
    finally:
        multiprocessing.util.spawnv_passfds = start_python


def _fork(path: object, args: Sequence[Any], passfds: Sequence[int]) -> int:
    """Run the code that a new Python would, after ``-c``, in a fork with these open files."""
    pid = os.fork()
    if pid != 0:
        return pid
    kept = sorted({0, 1, 2, *passfds})
    for before, after in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")]):
        os.closerange(before + 1, after)
    code = args.index("-c") + 1
    # (multiprocessing gives the path of Python as bytes.)
    sys.orig_argv[:] = [os.fsdecode(arg) for arg in args]
    sys.argv[:] = ["-c", *args[code + 1 :]]
    with contextlib.suppress(SystemExit):
        exec(args[code], {})
    # A server's own comes first, and ends the process.
    atexit._run_exitfuncs()
    os._exit(0)


def _make_folder() -> None:
    """Make the folder of this process's sockets, elsewhere if TMPDIR is too long for them."""
    if os.getpid() in _have_folders:
        return
    config: Any = multiprocessing.current_process()
    # It may be that of the process which has started this one: the server will remove its folder.
    config._config.pop("tempdir", None)
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > _LONGEST_PATH:
        tempfile.tempdir = _SHORT_FOLDER
    try:
        multiprocessing.util.get_temp_dir()
        _have_folders.add(os.getpid())
    except OSError as error:
        if tempfile.tempdir != _SHORT_FOLDER:
            raise
        raise OSError(
            f"the path of a socket has at most 107 bytes: the temporary folder {usual} is too "
            f"long for it, and {_SHORT_FOLDER} cannot be used ({error}). Next step: another TMPDIR"
        ) from None
    finally:
        tempfile.tempdir = usual


def _after_fork() -> None:
    """Forget the server in a fork of this process: that server is no child of the fork."""
    server: Any = multiprocessing.forkserver._forkserver
    if server._forkserver_pid is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_pid = server._forkserver_alive_fd = server._forkserver_address = None


os.register_at_fork(after_in_child=_after_fork)


def _end(_change: object) -> None:
    """End what a kernel that ends would wait for in vain: the tracker ignores its signals."""
    package: Any = multiprocessing
    package.util._exit_function()
    os.close(package.forkserver._forkserver._forkserver_alive_fd)
    package.resource_tracker._resource_tracker._stop()
    # To free what was imported takes a second. Triton would list what is never freed.
    gc.freeze()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@contextlib.contextmanager
def interrupts_later() -> Iterator[None]:
    """Delay Ctrl-C and the stop button until the end of the block.

    PyTorch cannot be imported again in a process where an interrupt has cut its import short.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[tuple[int, FrameType | None]] = []
    handler = signal.signal(signal.SIGINT, lambda number, frame: held.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if held and callable(handler):
        handler(*held[-1])
