"""Which device a tensor pretends to be on: labels of storages, followed through every function.

PyTorch calls a ``TorchFunctionMode`` before each of its functions. This one reads the labels of
the operands, calls the function on the CPU, and labels the results.
"""

from contextlib import contextmanager

import pretended_gpus as gpus
import torch
from pretended_cuda import Held
from pretended_gpus import CPU
from torch.overrides import TorchFunctionMode

T = torch.Tensor
_ORIGINALS = {}


# Labels


def storage_of(tensor):
    """The tensor's storage if it has one on the CPU, else None (meta, sparse, under vmap)."""
    try:
        return tensor.untyped_storage() if tensor.device.type == "cpu" else None
    except (NotImplementedError, RuntimeError):
        return None


def label(tensor):
    """The device that the tensor pretends to be on; None where Python has not seen it yet."""
    storage = storage_of(tensor)
    held = None if storage is None else storage.__dict__.get("held")
    if held is not None:
        return held.device
    return None if in_backward() or storage is None else CPU


def set_label(tensor, device):
    """Label a tensor whose storage has no label yet."""
    storage = storage_of(tensor)
    if storage is not None and "held" not in storage.__dict__:
        storage.held = Held(device, storage.nbytes())
    return tensor


def in_backward():
    return torch._C._current_graph_task_id() != -1


def shown(tensor):
    """The device that ``tensor.device`` shows."""
    if (found := label(tensor)) is not None:
        return found
    if tensor.device.type == "cpu" and in_backward() and gpus.is_initialized():
        return torch.device("cuda", gpus.current())
    return tensor.device


def tensors_in(values):
    """The tensors among values, lists, tuples and dictionaries, at any depth."""
    for value in values:
        if isinstance(value, T):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, dict):
            yield from tensors_in(value.values())


def common(func, tensors):
    """The device of a function's operands; a single number on the CPU may meet any GPU.

    Raises:
        RuntimeError: the operands are on two devices.
    """
    found, number = None, None
    for tensor in tensors:
        device = label(tensor)
        if device is None or device == found:
            continue
        if device == CPU and tensor.dim() == 0:
            number = device
        elif found is None:
            found = device
        else:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{found} and {device}! (in {getattr(func, '__name__', func)})"
            )
    return found or number


# The functions that are not like the others


def moved(tensor, device, dtype=None, copy=False, memory_format=None):
    """The tensor on another device, as a copy; itself where nothing changes."""
    more = {} if memory_format is None else {"memory_format": memory_format}
    dtype = tensor.dtype if dtype is None else dtype
    if device.type not in ("cpu", "cuda"):
        return tensor.to(device, dtype, copy=copy, **more)
    away = label(tensor) not in (None, device)
    with torch._C.DisableTorchFunction():
        return set_label(tensor.to(dtype, copy=copy or away, **more), device)


def _to(func, args, kwargs):
    tensor, *args = args
    kwargs = dict(kwargs)
    copy = kwargs.pop("copy", False)
    other = kwargs.pop("other", None)
    if args and isinstance(args[0], T):
        other, *args = args
    if other is not None:
        return moved(tensor, shown(other), other.dtype, copy)
    if len(args) > 1 and isinstance(args[-1], bool):
        # to(device, dtype, non_blocking, copy) and to(dtype, non_blocking, copy)
        flags = [arg for arg in args if isinstance(arg, bool)]
        args = [arg for arg in args if not isinstance(arg, bool)]
        copy = copy or (len(flags) > 1 and flags[1])
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    target = shown(tensor) if device is None else gpus.resolved(device)
    return moved(tensor, target, dtype, copy, memory_format)


def _cuda(func, args, kwargs):
    device = args[1] if len(args) > 1 else kwargs.get("device")
    return moved(args[0], gpus.resolved("cuda" if device is None else device))


def _cpu(func, args, kwargs):
    return moved(args[0], CPU, memory_format=kwargs.get("memory_format"))


def _as_tensor(func, args, kwargs):
    device = kwargs.get("device")
    kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    out = func(*args, **kwargs)
    if device is None:
        return set_label(out, common(func, tensors_in(args[:1])) or CPU)
    target = gpus.resolved(device)
    return moved(set_label(out, CPU), target) if isinstance(args[0], T) else set_label(out, target)


def _only_on_cpu(func, args, kwargs):
    if shown(args[0]).type == "cuda":
        raise TypeError(
            f"can't convert {shown(args[0])} device type tensor to numpy. Use Tensor.cpu() to "
            "copy the tensor to host memory first."
        )
    return func(*args, **kwargs)


def _pin_memory(func, args, kwargs):
    tensor = args[0]
    if shown(tensor).type == "cuda":
        raise RuntimeError(
            "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned"
        )
    return set_label(tensor.clone(), CPU)


def _grad(func, args, kwargs):
    out = func(*args, **kwargs)
    return out if out is None else set_label(out, shown(args[0]))


def _gradients(func, args, kwargs):
    """``torch.autograd.grad``: each gradient is where its input is."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    inputs = (inputs,) if isinstance(inputs, T) else tuple(inputs)
    out = func(*args, **kwargs)
    for gradient, of in zip(out, inputs):
        if gradient is not None:
            set_label(gradient, shown(of))
    return out


def _get_item(func, args, kwargs):
    return set_label(func(*args, **kwargs), label(args[0]) or CPU)


def _one_by_one(func, args, kwargs):
    """Functions on lists: the operands of each position are on one device."""
    out = func(*args, **kwargs)
    if isinstance(out, (list, tuple)) and args and isinstance(args[0], (list, tuple)):
        for tensor, of in zip(out, args[0]):
            if isinstance(tensor, T) and isinstance(of, T):
                set_label(tensor, shown(of))
    return out


def _rebuilt(device, rebuild, arguments):
    return moved(rebuild(*arguments), gpus.resolved(device))


def _reduce(tensor, protocol):
    rebuild, arguments = _ORIGINALS["_reduce_ex_internal"](tensor, protocol)
    device = shown(tensor)
    if device.type != "cuda":
        return rebuild, arguments
    return _rebuilt, (str(device), rebuild, arguments)


def _unchanged(func, args, kwargs):
    return func(*args, **kwargs)


SPECIAL = {
    T.device.__get__: lambda func, args, kwargs: shown(args[0]),
    T.is_cuda.__get__: lambda func, args, kwargs: shown(args[0]).type == "cuda",
    T.is_cpu.__get__: lambda func, args, kwargs: shown(args[0]).type == "cpu",
    T.get_device: lambda func, args, kwargs: (
        -1 if (d := shown(args[0])).index is None else d.index
    ),
    T.grad.__get__: _grad,
    T.to: _to,
    T.cuda: _cuda,
    T.cpu: _cpu,
    T.numpy: _only_on_cpu,
    T.__array__: _only_on_cpu,
    T.pin_memory: _pin_memory,
    T.__getitem__: _get_item,
    torch.as_tensor: _as_tensor,
    torch.autograd.grad: _gradients,
}
# They may take operands from several devices.
FREE = (T.copy_, T.backward, torch.autograd.backward, T.register_hook, T.data.__set__, T.set_)
FREE += (torch._has_compatible_shallow_copy_type, torch.is_same_size, T.is_same_size, T.is_set_to)
FREE += (T.__setitem__, T.grad.__set__, torch.result_type)
FREE += (torch._amp_foreach_non_finite_check_and_unscale_,)
SPECIAL |= {func: _unchanged for func in FREE}
SPECIAL |= {
    getattr(torch, name): _one_by_one for name in dir(torch) if name.startswith("_foreach")
}


class Pretend(TorchFunctionMode):
    """Calls each function of torch on the CPU, and follows the labels through it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if in_backward() and isinstance(func, torch._ops.OpOverload):
            # Seen under a dispatch mode alone, with gradients that nobody has labeled.
            return func(*args, **kwargs)
        # A rank on NCCL wraps some of Tensor's methods; torch finds the wrapper by its name.
        special = SPECIAL.get(func) or SPECIAL.get(getattr(func, "__wrapped__", None))
        if special is not None:
            return special(func, args, kwargs)
        device, kwargs = _without_device(kwargs)
        if device is not None and device.type not in ("cpu", "cuda"):
            return func(*args, **kwargs)
        if device is None:
            device = common(func, tensors_in((*args, *kwargs.values())))
        if device is None:
            # A gradient without a label: its result keeps what it shows, also in other threads.
            device = next(map(shown, tensors_in(args)), CPU) if in_backward() else CPU
        if kwargs.get("generator") is not None and device is not None and device.type == "cuda":
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        out = func(*args, **kwargs)
        if device is not None:
            for tensor in tensors_in((out,)):
                set_label(tensor, device)
        return out


def _without_device(kwargs):
    """(device or None, the other options)."""
    if kwargs.get("device") is None:
        return None, kwargs
    device = gpus.resolved(kwargs["device"])
    # An operand may be on another device (``empty_like`` of a tensor without memory).
    return device, kwargs | {"device": CPU if device.type == "cuda" else device}


MODE = Pretend()


@contextmanager
def active():
    """Follow labels in this thread, unless that is done already."""
    stack = torch.overrides._get_current_function_mode_stack()
    if any(isinstance(mode, Pretend) for mode in stack):
        yield
        return
    with MODE:
        yield


def install():
    """Change what takes a device and is no function on tensors."""
    T.record_stream = lambda tensor, stream: None
    _ORIGINALS["_reduce_ex_internal"] = T._reduce_ex_internal
    T._reduce_ex_internal = _reduce
    run_backward = torch.autograd._engine_run_backward

    def _engine_run_backward(*args, **kwargs):
        # Hooks and backward functions of Python must see labels, too.
        with active():
            return run_backward(*args, **kwargs)

    torch.autograd._engine_run_backward = _engine_run_backward
    torch.autograd.graph._engine_run_backward = _engine_run_backward
    autocast = torch.amp.autocast_mode.autocast
    make = autocast.__init__

    def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
        if device_type == "cuda":
            device_type, dtype = "cpu", dtype or torch.float16
        make(self, device_type, dtype, enabled, cache_enabled)

    autocast.__init__ = __init__
