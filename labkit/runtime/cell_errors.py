"""An error in a notebook cell, on one screen: the learner's lines, the message, no other frames.

IPython shows every frame between the cell and the place of the error. When labkit is among them,
only the learner's own frames are shown, first the line that failed in a rank. Elsewhere (a script,
another package's error) nothing changes. In a cell, too, ``%xmode Verbose`` and ``%tb`` show all
frames, and ``error.worker_traceback`` is always complete.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, TracebackType
from typing import Any

from labkit.comm.source_lines import is_internal, is_ours
from labkit.errors import WorkerError
from labkit.units import spelling

Show = Callable[..., list[str]]

MOST_LINES = 30
# In a long chain of the learner's calls the first shows which cell it was, the last what failed.
_MOST_FRAMES = 4
_RANKS_TRACEBACK = "\n\nTraceback of rank "
_FRAME = re.compile(r"  (?:File )?\"?(\S.*?)\"?, line \d+")
_MOST_CHARS = 500


def show_errors_on_one_screen() -> None:
    """Show errors of this process's notebook or prompt so, if it is one; harmless if repeated."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    formatter: Any = getattr(shell, "InteractiveTB", None)
    if formatter is None or hasattr(formatter, "_labkit_shows"):
        return
    shown_by_ipython = formatter.structured_traceback

    def structured_traceback(
        etype: type, evalue: BaseException, etb: Any = None, *more: Any, **options: Any
    ) -> list[str]:
        if formatter.mode != "Context" or not _is_about_labkit(evalue, etb):
            return shown_by_ipython(etype, evalue, etb, *more, **options)
        return one_screen(shown_by_ipython, evalue, etb)

    formatter._labkit_shows = True
    formatter.structured_traceback = structured_traceback


def one_screen(show: Show, error: BaseException, tb: TracebackType | None) -> list[str]:
    """The parts of an error's text, as ``show``, IPython's ``structured_traceback``, makes them.

    They have at most ``MOST_LINES`` lines together, as long as the learner's frames allow it.
    """
    message, _, trace = str(error).partition(_RANKS_TRACEBACK)
    stand_in = Exception(message + spelling(error))
    stand_in.__cause__, stand_in.__context__ = error.__cause__, error.__context__
    stand_in.__suppress_context__ = error.__suppress_context__
    frames = own_frames(tb)
    with _only_own_frames(error):
        parts = show(type(error), stand_in, frames, 0, 5 if _length(frames) < 3 else 3)
    # IPython's first parts are a line of dashes and the type; its last is the message.
    first = _failed_line(error)
    in_rank = _of_learner(trace)
    notes = list(getattr(error, "__notes__", ()))
    room = MOST_LINES - sum(map(_num_lines, [*parts[:-1], *first, *in_rank]))
    message = _cut("\n".join([parts[-1], *notes]), max(room, 6))
    return [*parts[:1], *first, *parts[1:-1], *in_rank, message]


def _failed_line(error: BaseException) -> list[str]:
    """The line that failed in a rank, if it is known."""
    if isinstance(error, WorkerError) and error.rank is not None and error.location:
        return [f"rank {error.rank}, {error.location}"]
    return []


def _is_about_labkit(error: BaseException, tb: Any) -> bool:
    """Whether a frame is labkit's, or the object of an AttributeError."""
    if not isinstance(tb, TracebackType):
        return False  # IPython itself also passes other things
    thing = getattr(error, "obj", None)
    module = thing if isinstance(thing, ModuleType) else sys.modules.get(type(thing).__module__)
    if isinstance(error, AttributeError) and is_ours(getattr(module, "__file__", None) or ""):
        return True
    return any(is_ours(part.tb_frame.f_code.co_filename) for part in _parts(tb))


def _parts(tb: TracebackType | None) -> Iterator[TracebackType]:
    while tb is not None:
        yield tb
        tb = tb.tb_next


def _length(tb: TracebackType | None) -> int:
    return sum(1 for _ in _parts(tb))


def own_frames(tb: TracebackType | None) -> TracebackType | None:
    """The traceback without frames of libraries; of many frames, the first and the last."""
    own = [p for p in _parts(tb) if not is_internal(p.tb_frame.f_code.co_filename)]
    if len(own) > _MOST_FRAMES:
        own = [own[0], *own[1 - _MOST_FRAMES :]]
    short = None
    for part in reversed(own):
        short = TracebackType(short, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return short


@contextmanager
def _only_own_frames(error: BaseException) -> Iterator[None]:
    """Shorten the tracebacks of an error's causes, too, while the block runs."""
    kept: dict[int, tuple[BaseException, TracebackType | None]] = {}
    waiting = [error.__cause__, error.__context__]
    while waiting:
        cause = waiting.pop()
        if cause is not None and id(cause) not in kept:
            kept[id(cause)] = cause, cause.__traceback__
            waiting += [cause.__cause__, cause.__context__]
            cause.__traceback__ = own_frames(cause.__traceback__)
    try:
        yield
    finally:
        for cause, tb in kept.values():
            cause.__traceback__ = tb


def _of_learner(trace: str) -> list[str]:
    """A rank's traceback without the frames of libraries; nothing if one frame is left."""
    kept, num_frames, is_own = [], 0, True
    for line in trace.splitlines():
        if match := _FRAME.match(line):
            is_own = not is_internal(match[1])
            num_frames += is_own
        elif not line.startswith("  "):
            is_own = True
        if is_own:
            kept.append(line)
    # The first line of all has shown the only frame.
    return [_cut("\n".join([f"In rank {kept[0]}", *kept[1:]]), 12)] if num_frames > 1 else []


def _num_lines(text: str) -> int:
    return text.count("\n") + 1


def _cut(text: str, most: int) -> str:
    """The text without the middle of long lines, or of more than ``most`` lines."""
    lines = [_cut_line(line) for line in text.splitlines()]
    if len(lines) > most:
        tail = most // 2
        head = most - tail - 1
        left_out = len(lines) - head - tail
        gap = f"... {left_out} lines are left out; %xmode Verbose, then %tb, shows them"
        lines = [*lines[:head], gap, *lines[len(lines) - tail :]]
    return "\n".join(lines)


def _cut_line(line: str) -> str:
    half = _MOST_CHARS // 2
    if len(line) <= _MOST_CHARS:
        return line
    return f"{line[:half]} ... {len(line) - 2 * half:,} characters ... {line[-half:]}"
