"""The ``torch.distributed`` backend "labkit": our collectives under PyTorch's own DDP.

``import labkit`` makes it known to PyTorch, without importing PyTorch: at once if
``torch.distributed`` has been imported already, and otherwise right after its import. The backend
itself is loaded by the first process group that asks for it.

Where labkit is installed, PyTorch finds it by its name alone, in the entry points
"torch.distributed.backends"; a labkit that is only on PYTHONPATH needs the import.
"""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submodules={"operations"},
    submod_attrs={
        "chosen": ["all_reduce", "ddp_hook", "use"],
        "group": ["LabkitGroup", "sent"],
    },
)


def register_backend() -> None:
    """Register now, or when ``torch.distributed`` is imported."""
    if hasattr(sys.modules.get(_WhenTorchComes.host), "Backend"):
        _register(sys.modules[_WhenTorchComes.host])
    else:
        sys.meta_path.insert(0, _WhenTorchComes())


def _register(distributed: ModuleType) -> None:
    if not hasattr(distributed.Backend, "LABKIT"):
        distributed.Backend.register_backend(
            "labkit", _new_group, extended_api=True, devices=["cpu"]
        )


def _new_group(group: Any, options: object) -> Any:
    """Make a group; the extended interface says which ranks of the run are in it."""
    names = _backends_by_device()
    if any(name == "labkit" and device != "cpu" for device, name in names.items()):
        raise ValueError(
            f'{names}: the "labkit" backend is for CPU tensors. Name another backend for each '
            'other device, for example init_process_group("cpu:labkit,cuda:nccl")'
        )
    # Read before ``make_backends``, which gives the group's store another prefix.
    ranks = group.global_ranks_in_group
    settings = group.store, group.group_rank, group.group_size, group.timeout, ranks
    other_names = {device: name for device, name in names.items() if name != "labkit"}
    if not other_names:
        labkit_group = importlib.import_module("labkit.backend.group")
        return labkit_group.LabkitGroup(*settings)
    composite = importlib.import_module("labkit.backend.composite")
    backends = composite.make_backends(other_names, group, options)
    composite_group = composite.CompositeGroup(*settings)
    composite_group.add_backends(backends, other_names)
    return composite_group


def _backends_by_device() -> dict[str, str]:
    """Return the backends of the group that PyTorch is making, by device.

    No argument of ``_new_group`` tells which stand beside "labkit", so they are read where
    PyTorch keeps them, in the function that calls it.
    """
    config = sys._getframe(2).f_locals.get("backend_config")
    return config.get_device_backend_map() if config else {"cpu": "labkit"}


class _WhenTorchComes:
    """An import hook that registers the backend when ``torch.distributed`` has been imported."""

    host = "torch.distributed"

    def find_spec(
        self, name: str, path: Any = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.host:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                _register(module)

            spec.loader.exec_module = load_and_register
        return spec
