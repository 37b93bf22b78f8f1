"""One process group for several devices: ``init_process_group("cpu:labkit,cuda:nccl")``.

PyTorch takes a group in Python as it is, and makes no backend for the devices that are named after
it. So this group makes them itself, and registers them as PyTorch's own group does: a tensor of
the CPU takes our way, any other PyTorch's way to the backend of its device.
"""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.backend.group import LabkitGroup
from labkit.backend.operations import METHODS

# Methods that PyTorch hands to the backend of their tensors, or of the device that they are given.
BY_DEVICE = (
    *METHODS,
    "send",
    "recv",
    "recv_anysource",
    "_start_coalescing",
    "_end_coalescing",
)


class CompositeGroup(LabkitGroup):
    """A ``LabkitGroup`` that has other backends for other devices.

    A barrier without a device waits on the CPU.
    """

    supports_splitting = False

    def add_backends(self, backends: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Register ``backends``, by device; ``names`` are PyTorch's names of them."""
        for device, backend in backends.items():
            custom = dist.ProcessGroup.BackendType.CUSTOM
            backend_type = dist.Backend.backend_type_map.get(names[device], custom)
            self._register_backend(torch.device(device), backend_type, backend)
            self._set_default_backend(backend_type)
        self._device_types = [torch.device(device) for device in ("cpu", *backends)]

    def _set_group_name(self, name):
        super()._set_group_name(name)
        dist.ProcessGroup._set_group_name(self, name)

    def _set_group_desc(self, description):
        super()._set_group_desc(description)
        dist.ProcessGroup._set_group_desc(self, description)

    def get_backend(self, device):
        if torch.device(device).type == "cpu":
            return self
        return dist.ProcessGroup._get_backend(self, torch.device(device))

    _get_backend = get_backend

    def set_timeout(self, timeout):
        super().set_timeout(timeout)
        for device in self._device_types[1:]:
            self.get_backend(device).set_timeout(timeout)

    def shutdown(self, patience_s: float | None = None) -> None:
        super().shutdown(patience_s)
        if patience_s is None:
            for device in self._device_types[1:]:
                self.get_backend(device).shutdown()


def make_backends(names: Mapping[str, str], opts: Any, options: object) -> dict[str, Any]:
    """Make the backends ``names``, by device.

    Args:
        opts, options: what PyTorch gives to the function that makes a backend.

    Raises:
        ValueError: PyTorch alone can make one of them.
        Exception: what a backend raises, for example where there is no GPU.
    """
    backends = {}
    for device, name in names.items():
        with contextlib.suppress(RuntimeError):
            # A device that is named before the CPU has its backend already.
            backends[device] = opts.process_group._get_backend(torch.device(device))
            continue
        plugin = dist.Backend._plugins.get(name.upper())
        if plugin is None or not plugin.extended_api:
            raise ValueError(
                f'{name} has to be made before "labkit": name the CPU last, as in '
                f'init_process_group("{device}:{name},cpu:labkit")'
            )
        opts.store = dist.PrefixStore(f"{device}/", opts.store)
        backends[device] = plugin.creator_fn(opts, options)
    return backends


def by_device(name: str) -> Callable[..., Any]:
    """Return the method ``name``: labkit's for the CPU, and otherwise PyTorch's."""
    labkit_method = getattr(LabkitGroup, name)
    pytorch_method = getattr(dist.ProcessGroup, name)

    def method(self: CompositeGroup, *args: Any, **options: Any) -> Any:
        if device_of((*args, *options.values())) == "cpu":
            return labkit_method(self, *args, **options)
        return pytorch_method(self, *args, **options)

    return method


def device_of(values: Iterable[Any]) -> str:
    """Return the type of the first device, or tensor's device, in nested lists; else "cpu"."""
    for value in values:
        if isinstance(value, torch.device):
            return value.type
        if isinstance(value, Tensor):
            return value.device.type
        if isinstance(value, list | tuple) and value:
            return device_of(value)
    return "cpu"


for _name in BY_DEVICE:
    if hasattr(dist.ProcessGroup, _name):
        setattr(CompositeGroup, _name, by_device(_name))
