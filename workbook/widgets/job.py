"""One job at a time in the background, which can be stopped: what a widget's button starts.

A handler that worked for seconds would hold up all other messages, a press of Stop among them.
"""

import ctypes
import threading
from collections.abc import Callable

_raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc


class Job:
    """Runs a function in a thread and says how it went.

    ``stop`` raises KeyboardInterrupt in the thread, as Ctrl-C does in a cell.
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
        self._thread = None
        self._say("", said)
