"""``import labkit`` makes the backend "labkit" known to PyTorch, without importing PyTorch.

The name is registered at once where ``torch.distributed`` is there already, and otherwise as soon
as it is imported. The backend itself is loaded by the first process group that asks for it.
"""

import importlib
import importlib.util
import sys

_NAME = "labkit"
_HOST = "torch.distributed"


def register_backend() -> None:
    """Register now, or when ``torch.distributed`` comes; again is harmless."""
    if hasattr(sys.modules.get(_HOST), "Backend"):
        _register(sys.modules[_HOST])
    elif not any(isinstance(finder, _WhenTorchComes) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenTorchComes())


def _register(distributed) -> None:
    # A build of PyTorch without distributed has no Backend.
    if hasattr(distributed, "Backend") and not hasattr(distributed.Backend, _NAME.upper()):
        distributed.Backend.register_backend(_NAME, _new_group, devices=["cpu"])


def _new_group(*args):
    return importlib.import_module("labkit.backend.group").LabkitGroup(*args)


class _WhenTorchComes:
    """A finder that finds nothing itself: it sees one import pass, and acts after it."""

    def find_spec(self, name, path=None, target=None):
        if name != _HOST:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module):
                load(module)
                _register(module)

            spec.loader.exec_module = load_and_register
        return spec
