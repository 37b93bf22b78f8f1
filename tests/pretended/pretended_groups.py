"""Process groups on pretended GPUs: gloo that says nccl, and what only NCCL does."""

import sys

import pretended_gpus as gpus
import pretended_labels as labels
import torch
import torch.distributed.distributed_c10d as c10d

_NCCL = "nccl"
_named_nccl = set()
_METHODS = ("send", "recv", "recv_anysource", "allreduce", "broadcast", "reduce", "allgather")
_METHODS += ("_allgather_base", "reduce_scatter", "_reduce_scatter_base", "gather", "scatter")
_METHODS += ("alltoall", "alltoall_base", "allreduce_coalesced")
# Gloo moves these between GPUs itself; the others only between host memories.
_HOST_ONLY = ("send", "recv", "recv_anysource")


def install():
    """Change ``torch.distributed`` in this process; called once, after its import."""
    make, new, backend_of = c10d.init_process_group, c10d.new_group, c10d.get_backend

    def init_process_group(backend=None, *args, device_id=None, **kwargs):
        if device_id is not None:
            assert torch.device(device_id).type == "cuda", device_id
        is_nccl = backend == _NCCL
        make("gloo" if is_nccl else backend, *args, **kwargs)
        if is_nccl:
            _named_nccl.add(c10d._get_default_group().group_name)

    def new_group(*args, backend=None, device_id=None, **kwargs):
        group = new(*args, backend="gloo" if backend == _NCCL else backend, **kwargs)
        says = _says_nccl(c10d._get_default_group()) if backend is None else backend == _NCCL
        if says and isinstance(group, c10d.ProcessGroup):
            _named_nccl.add(group.group_name)
        return group

    def get_backend(group=None):
        found = backend_of(group)
        return _NCCL if _says_nccl(group or c10d._get_default_group()) else found

    ours = {
        "init_process_group": init_process_group,
        "new_group": new_group,
        "get_backend": get_backend,
        "is_nccl_available": lambda: True,
    }
    for module in _modules():
        for name, value in ours.items():
            if hasattr(module, name):
                setattr(module, name, value)
    for name in _METHODS:
        _check_tensors(name)
    for function in (broadcast_coalesced, reduce_add_coalesced, scatter, gather):
        setattr(torch.nn.parallel.comm, function.__name__, function)


def _modules():
    """The modules of ``torch.distributed``: some have taken over names from c10d."""
    return [m for name, m in sys.modules.items() if name.startswith("torch.distributed") and m]


def _says_nccl(group):
    return group.group_name in _named_nccl


def _check_tensors(name):
    method = getattr(c10d.ProcessGroup, name, None)
    if method is None:
        return

    def checked(group, *args, **kwargs):
        for tensor in labels.tensors_in((*args, *kwargs.values())):
            device = labels.label(tensor)
            if _says_nccl(group) and device == labels.CPU:
                raise RuntimeError("No backend type associated with device type cpu")
            if not _says_nccl(group) and name in _HOST_ONLY and device not in (None, labels.CPU):
                raise RuntimeError(f"gloo's {name} moves host memory only, got {device}")
        work = method(group, *args, **kwargs)
        return _Waited(work) if _says_nccl(group) and name in _HOST_ONLY else work

    setattr(c10d.ProcessGroup, name, checked)


class _Waited:
    """A work of gloo that may be waited for again, as NCCL's; gloo's own would hang."""

    def __init__(self, work):
        self._work, self._ended, self._error = work, False, None

    def wait(self, *patience):
        if not self._ended:
            try:
                self._work.wait(*patience)
            except RuntimeError as error:
                self._error = error
            self._ended = True
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self):
        return self._ended or self._work.is_completed()

    def __getattr__(self, name):
        return getattr(self._work, name)


# What nn.DataParallel does between GPUs


def _on(device, tensor):
    return labels.moved(tensor, gpus.resolved(device))


def broadcast_coalesced(tensors, devices, buffer_size=None):
    return [[_on(device, tensor.detach()) for tensor in tensors] for device in devices]


def reduce_add_coalesced(inputs, destination=None, buffer_size=None):
    on_one = ([_on(destination, part) for part in parts] for parts in zip(*inputs))
    return tuple(torch.stack(parts).sum(dim=0) for parts in on_one)


def scatter(tensor, devices, chunk_sizes=None, dim=0, streams=None, *, out=None):
    parts = (
        tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(chunk_sizes, dim)
    )
    return tuple(_on(device, part) for device, part in zip(devices, parts))


def gather(tensors, dim=0, destination=None, *, out=None):
    return torch.cat([_on(destination, tensor) for tensor in tensors], dim)
