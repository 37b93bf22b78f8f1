"""Locations of the learner's own lines: in a worker, in a traceback, in a notebook cell.

A location travels as Python writes it in a traceback, ``"FILE", line N``, so that one pattern
finds it in tracebacks, in stack dumps and in our own messages.
"""

import contextlib
import linecache
import os
import re
import sys
import sysconfig
import threading
from pathlib import Path

_PACKAGE = str(Path(__file__).resolve().parents[2]) + os.sep
# Files of the frames between a learner's call and ours, generated code ("<string>") among them.
_OUR_PREFIXES = (_PACKAGE, contextlib.__file__, "<")
# What a learner has typed at a prompt.
_PROMPTS = ("<ipython-input-", "<stdin>", "<python-input-")
_LIBRARIES = (f"{os.sep}torch{os.sep}", f"{os.sep}multiprocessing{os.sep}")
# Python's own modules, and installed packages.
_INSTALLED = tuple(
    {sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_credited = threading.local()
_LOCATION = re.compile(r'(?:File )?"([^"\n]+)", line (\d+)')


def caller_location() -> str:
    """Return the innermost frame that is neither labkit's nor a library's: ``"FILE", line N``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_internal(frame.f_code.co_filename):
        frame = frame.f_back
    if frame.f_code.co_filename == threading.__file__:
        # A thread of labkit, with no learner's function on its stack.
        return getattr(_credited, "location", "a thread")
    if is_internal(frame.f_code.co_filename):
        return "a line that is not yours"
    return f'"{frame.f_code.co_filename}", line {frame.f_lineno}'


def credit_to(location: str) -> None:
    """Attribute what this thread does from now on to ``location``, which asked for it."""
    _credited.location = location


def count_as_ours(init_file: str) -> None:
    """Count the frames of this package, which is built on labkit, as not the learner's either."""
    global _OUR_PREFIXES
    _OUR_PREFIXES += (str(Path(init_file).resolve().parent) + os.sep,)


def is_ours(filename: str) -> bool:
    """Tell whether a file is labkit's, or of the code between a learner's call and labkit."""
    return filename.startswith(_OUR_PREFIXES) and not filename.startswith(_PROMPTS)


def is_internal(filename: str) -> bool:
    """Tell whether a file is labkit's own or a library's, not the learner's."""
    if is_ours(filename) or filename.startswith(_INSTALLED):
        return True
    return any(part in filename for part in _LIBRARIES)


def learner_frames(stack: str) -> str:
    """Keep the lines of a stack dump that are in the learner's code; all lines if none is."""
    lines = []
    for line in stack.splitlines():
        match = _LOCATION.search(line)
        if match and not is_internal(match[1]):
            lines.append(line)
    return "\n".join(lines) or stack


def cell_sources() -> dict[str, list[str]]:
    """Return the sources that exist only in this process (notebook cells), by file name."""
    sources = {}
    for name, entry in list(linecache.cache.items()):
        # linecache marks an entry that no file on disk backs with a modification time of None.
        if len(entry) == 4 and entry[1] is None:
            sources[name] = entry[2]
    return sources


def install_sources(sources: dict[str, list[str]]) -> None:
    """Make another process's cell sources known here, so that tracebacks can quote them."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)


def readable(text: str, *, quote: bool = True) -> str:
    """Rewrite each location in ``text`` for a reader: ``Cell In[3], line 4: comm.recv(x, 1)``.

    Args:
        text: any text with locations in it.
        quote: append the source line (a traceback has it already: pass False).
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    cells = getattr(getattr(shell, "compile", None), "_filename_map", {})

    def rewrite(match: re.Match[str]) -> str:
        filename, number = match.groups()
        shown_name = f"Cell In[{cells[filename]}]" if filename in cells else filename
        location = f"{shown_name}, line {number}"
        source = linecache.getline(filename, int(number)).strip()
        return f"{location}: {source}" if quote and source else location

    return _LOCATION.sub(rewrite, text)
