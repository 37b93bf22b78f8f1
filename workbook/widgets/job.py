"""One job at a time in the background, which can be stopped: what a widget's button starts.

JupyterLab hands a widget's messages to the kernel one after another. A handler that worked for
seconds would hold up all others, the press of Stop among them.
"""

import ctypes
import signal
import threading
from collections.abc import Callable
from typing import Any

from IPython.core.getipython import get_ipython

_raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc


class Job:
    """Runs a function in a thread and says how it went.

    ``stop`` raises KeyboardInterrupt in the thread, as Ctrl-C does in a cell. So does the
    notebook's stop button, unless a cell is running: then it stops the cell.
    """

    def __init__(self, say: Callable[[str, str], None]):
        """``say(doing, said)`` is called at the start and at the end, then ``doing`` is empty."""
        self._say = say
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._may_stop = False

    def start(self, doing: str, work: Callable[[], str]) -> None:
        """Begin ``work``, which returns what is to be said; does nothing during another job."""
        with self._lock:
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
            self._may_stop = True
        self._say(doing, "")
        self._thread.start()
        _in_main_thread(self._listen)

    def stop(self) -> None:
        """Interrupt the job, once; without a job, do nothing."""
        with self._lock:
            if self._thread is not None and self._thread.ident and self._may_stop:
                self._may_stop = False
                thread = ctypes.c_ulong(self._thread.ident)
                _raise_in_thread(thread, ctypes.py_object(KeyboardInterrupt))

    def join(self) -> None:
        """Wait until no job is running."""
        if (thread := self._thread) is not None:
            thread.join()

    def _run(self, work: Callable[[], str]) -> None:
        said = "stopped"
        try:
            try:
                said = work()
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            with self._lock:
                self._may_stop = False
                # An interrupt that is on its way would come after the job.
                _raise_in_thread(ctypes.c_ulong(threading.get_ident()), None)
        except KeyboardInterrupt:
            # There is one interrupt per job, so none can come from here on.
            said = "stopped"
        _in_main_thread(self._listen_no_more)
        self._thread = None
        self._say("", said)

    def _listen(self) -> None:
        # While no cell runs, a kernel ignores the stop button.
        if self._thread is not None and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, self._interrupted)

    def _listen_no_more(self) -> None:
        if signal.getsignal(signal.SIGINT) == self._interrupted:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _interrupted(self, *_: Any) -> None:
        # Not here: the main thread may hold the lock.
        threading.Thread(target=self.stop).start()


def _in_main_thread(call: Callable[[], Any]) -> None:
    """In a notebook, call this between two cells, where signals can be set; elsewhere never."""
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is not None:
        kernel.io_loop.add_callback(call)
