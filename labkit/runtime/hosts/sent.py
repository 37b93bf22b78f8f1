"""What the ranks on other hosts get of the driver's process.

A function travels by value if it is defined in a notebook or in the main file, as on one machine.
Other hosts do not have the modules beside these files either: their functions and classes travel
by value, too. Modules that are installed are imported there.
"""

import contextlib
import linecache
import os
import site
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import cloudpickle

from labkit.comm.source_lines import cell_sources
from labkit.runtime.variables import variables_now

_PLACES = ("stdlib", "platstdlib", "purelib", "platlib")
# The driver's are not those of another host; Ray sets CUDA_VISIBLE_DEVICES for its actors.
_OWN = (
    "RAY_",
    "PYTHONBREAKPOINT",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "PYTEST_",
)


@dataclass(frozen=True)
class Sent:
    """Of the driver's process.

    Attributes:
        variables: the environment variables that the program has set since it began, and labkit's.
        folder: the current folder; hosts that do not have it stay where they are.
    """

    variables: dict[str, str]
    folder: str


def of_this_process() -> Sent:
    before = _variables_at_start()
    changed = {
        name: value
        for name, value in variables_now().items()
        if (before.get(name) != value or name.startswith("LABKIT_")) and not name.startswith(_OWN)
    }
    return Sent(changed, os.getcwd())


def sources() -> dict[str, list[str]]:
    """The sources that other hosts do not have, by file name, for their ranks' tracebacks."""
    modules = [sys.modules["__main__"], *_local_modules()]
    files = [path for module in modules if (path := getattr(module, "__file__", None))]
    return {path: linecache.getlines(path) for path in files} | cell_sources()


def _variables_at_start() -> dict[str, str]:
    """The variables with which this process began, where the system tells."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return variables_now()
    parted = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, _, value in parted}


@contextlib.contextmanager
def local_modules_by_value() -> Iterator[None]:
    """Within the block, cloudpickle sends what is defined in modules that are not installed."""
    known = cloudpickle.list_registry_pickle_by_value()
    mine = [module for module in _local_modules() if module.__name__ not in known]
    for module in mine:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in mine:
            cloudpickle.unregister_pickle_by_value(module)


def _local_modules() -> list[ModuleType]:
    installed = {sysconfig.get_path(name) for name in _PLACES}
    installed |= {*site.getsitepackages(), site.getusersitepackages()}
    installed.add(str(Path(__file__).parents[2]))
    # One for each spelling of a path: an environment is often reached through a link.
    roots = tuple({os.path.join(spelled, "") for p in installed for spelled in _spellings(p)})
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType)
        and module.__name__ == name != "__main__"
        and (path := getattr(module, "__file__", None))
        and not path.startswith(roots)
    ]


def _spellings(path: str) -> tuple[str, str]:
    return path, os.path.realpath(path)
