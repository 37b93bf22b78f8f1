"""``display(...)`` and ``plt.show()`` in a rank: what they are given is sent to the launcher.

A rank has no notebook kernel. The launcher shows the objects in its cell, by rank, among the lines
that the rank has printed; in a script, it prints them as text.
"""

import builtins
import contextlib
import importlib.abc
import json
import os
import secrets
import sys
import threading
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing.connection import Connection
from typing import Any

from labkit.runtime.messages import Shown, send
from labkit.runtime.screen import marker
from labkit.units import format_bytes

# Limits per rank and run: a page with more can hardly be opened.
MOST_BYTES = 20 * 2**20
MOST_OBJECTS = 200
# Its view refers to an object of this process, which ends.
_WIDGET = "application/vnd.jupyter.widget-view+json"
_BACKEND = "module://labkit.runtime.figures"

_sender: "Sender | None" = None


class Sender:
    """Sends a rank's objects to its launcher, and marks their places in its output."""

    def __init__(self, rank: int, control: Connection):
        self._rank, self._control = rank, control
        self._count = self._num_bytes = 0
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def publish(
        self,
        data: dict[str, Any],
        metadata: dict[str, Any] | None = None,
        display_id: str = "",
        is_update: bool = False,
    ) -> None:
        """Send one object, as a dict by MIME type; a sentence instead of one that is too large."""
        if os.getpid() != self._pid:
            return  # a forked child has the same pipe, and only the rank itself may write to it
        data = {kind: _plain(value) for kind, value in data.items() if kind != _WIDGET}
        with self._lock:
            if not (data := self._within_limits(data)):
                return
            self._count += 1
            about = _plain(metadata or {}), display_id, is_update
            send(self._control, Shown(self._rank, self._count, data, *about))
            if not is_update:
                self._mark(self._count)

    def _within_limits(self, data: dict[str, Any]) -> dict[str, Any]:
        num_bytes = sum(map(_size, data.values()))
        if self._count > MOST_OBJECTS:
            return {}
        if self._count == MOST_OBJECTS:
            return {"text/plain": f"further objects are left out: a rank may show {MOST_OBJECTS}"}
        if self._num_bytes + num_bytes > MOST_BYTES:
            return {
                "text/plain": f"an object of {format_bytes(num_bytes)} is left out: a rank may "
                f"show {format_bytes(MOST_BYTES)} in a run"
            }
        self._num_bytes += num_bytes
        return data

    def _mark(self, number: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            # The function may have replaced or closed the stream.
            with contextlib.suppress(Exception):
                stream.flush()
        with contextlib.suppress(OSError):
            os.write(1, marker(number))


def install(rank: int, control: Connection) -> None:
    """Let ``display``, pyplot and tqdm work in this process, a rank."""
    global _sender
    _sender = Sender(rank, control)
    vars(builtins)["display"] = display
    for name, change in _CHANGES.items():
        if name in sys.modules:
            change(sys.modules[name])
    sys.meta_path.insert(0, _Finder())
    if "inline" in os.environ.get("MPLBACKEND", "inline"):
        os.environ["MPLBACKEND"] = _BACKEND


def show_open_figures() -> None:
    """Show the figures that pyplot has open, as a notebook does at the end of a cell."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None and _BACKEND in str(pyplot.get_backend()):
        pyplot.show()


def display(
    *objects: Any,
    metadata: dict[str, Any] | None = None,
    transient: dict[str, Any] | None = None,
    display_id: str | bool | None = None,
    raw: bool = False,
    update: bool = False,
    **options: Any,
) -> Any:
    """What ``IPython.display.display`` is in a notebook: show objects in the cell.

    Returns:
        With ``display_id``, a handle whose ``update`` shows another object in the same place.
    """
    assert _sender is not None, "it was installed with the rank"
    name = display_id or (transient or {}).get("display_id") or ""
    name = secrets.token_hex(8) if name is True else str(name)
    chosen = {key: options[key] for key in ("include", "exclude") if options.get(key)}
    for thing in objects:
        data, about = (thing, {}) if raw else _formatted(thing, **chosen)
        if data:
            _sender.publish(data, {**about, **(metadata or {})}, name, update)
    return Handle(name) if display_id else None


class Handle:
    """The place of a displayed object."""

    def __init__(self, display_id: str):
        self.display_id = display_id

    def display(self, thing: Any, **options: Any) -> None:
        display(thing, display_id=self.display_id, **options)

    def update(self, thing: Any, **options: Any) -> None:
        display(thing, display_id=self.display_id, update=True, **options)


def _update_display(thing: Any, *, display_id: str, **options: Any) -> None:
    options.pop("update", None)
    display(thing, display_id=display_id, update=True, **options)


def _publish(
    data: dict[str, Any], metadata: dict[str, Any] | None = None, *_: Any, **options: Any
) -> None:
    known = {key: options[key] for key in ("transient", "update") if key in options}
    display(data, metadata=metadata, raw=True, **known)


def _replace(module: types.ModuleType) -> None:
    vars(module).update(
        display=display, update_display=_update_display, publish_display_data=_publish
    )


def _use_text_bars(module: types.ModuleType) -> None:
    """In ``tqdm.notebook``, whose bars are widgets, which need a kernel."""
    import tqdm.std

    bars, ranges = tqdm.std.tqdm, tqdm.std.trange
    vars(module).update(tqdm=bars, tqdm_notebook=bars, trange=ranges, tnrange=ranges)


_CHANGES: dict[str, Callable[[types.ModuleType], None]] = {
    "IPython.core.display_functions": _replace,
    "tqdm.notebook": _use_text_bars,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Makes these changes when a module is imported, which happens in few ranks."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in _CHANGES:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_change(module: types.ModuleType) -> None:
                execute(module)
                _CHANGES[fullname](module)

            vars(spec.loader)["exec_module"] = execute_and_change
        return spec


def _formatted(thing: Any, **chosen: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """By MIME type, as IPython formats it; text only where there is no IPython."""
    try:
        from IPython.core.formatters import DisplayFormatter
    except ImportError:
        return {"text/plain": repr(thing)}, {}
    formatter = DisplayFormatter()
    formatter.formatters["image/png"].for_type_by_name("matplotlib.figure", "Figure", _png)
    return formatter.format(thing, **chosen)


def _png(figure: Any) -> bytes:
    import io

    target = io.BytesIO()
    figure.savefig(target, format="png", bbox_inches="tight")
    return target.getvalue()


def _plain(value: Any) -> Any:
    """Text, bytes, or what JSON can hold: the launcher unpickles nothing else."""
    if isinstance(value, str | bytes):
        return value
    return json.loads(json.dumps(value, default=str))


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes) else len(json.dumps(value))
