"""Training steps on GPUs that do not exist: tensors with a device and no values.

PyTorch's FakeTensorMode refuses an operation whose operands are on two devices, as CUDA does.
Here it also notes what would make the host wait for a GPU. Autograd's engine would ask the driver
for the devices, so a backward is replaced: it walks the same graph, runs the same functions and
hooks, and gives every leaf a gradient on the leaf's own device.
"""

import contextlib
import heapq
import itertools
import traceback
from concurrent.futures import ThreadPoolExecutor, wait
from types import SimpleNamespace

import simulated_gpu
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit.comm.board import Board
from labkit.comm.comm import Comm
from labkit.comm.transport import Traffic
from labkit.comm.work import WorkQueue

aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)


class Gpus(FakeTensorMode):
    """A mode in which tensors have no values; ``waits`` are the places where the host would wait.

    A number that is read from a tensor is 1. A copy between host and GPU is waited for unless it
    is asked not to, and the host's memory is pinned.
    """

    def __init__(self):
        super().__init__()
        self.waits = []
        self._pinned = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        options = dict(kwargs or {})
        if func is aten._local_scalar_dense.default:
            self._note("item", args[0].device)
            return args[0].dtype == torch.bool or 1
        if func is aten._pin_memory.default:
            func, is_pinned = aten.clone.default, True
        else:
            is_pinned = bool(options.pop("pin_memory", False))
        made = super().__torch_dispatch__(func, types, args, options)
        if is_pinned:
            self._pinned[_address(made)] = made
        if func in COPIES:
            source, target = (args[1], args[0]) if func is COPIES[1] else (args[0], made)
            is_asked = options.get("non_blocking") or True in args[2:3]
            self._copied(source, target, is_asked)
        return made

    def _copied(self, source, target, may_go_on):
        host = [tensor for tensor in (source, target) if tensor.device.type == "cpu"]
        if len(host) == 1 and not (may_go_on and _address(host[0]) in self._pinned):
            self._note("copy", source.device, target.device)

    def _note(self, what, *devices):
        if any(device.type == "cuda" for device in devices):
            self.waits.append(f"{what} at {_place()}")


def _place():
    ours = [f for f in traceback.extract_stack() if "/labkit/" in f.filename]
    return f"{ours[-1].filename.rpartition('/labkit/')[2]}: {ours[-1].line}" if ours else "a test"


class FakeComm(Comm):
    """Of one rank, whose messages go nowhere; a tensor on another device than the rank's fails."""

    def __init__(self, rank, world_size, device):
        transport = SimpleNamespace(
            sent=Traffic(), shares_memory=False, ends_together=False, queues=False
        )
        super().__init__(rank, world_size, torch.device(device), transport, Board(world_size))
        # As in a run, which has begun by the host's clock.
        self.session.recorder.origin = 0.0

    def _check(self, *tensors):
        for tensor in tensors:
            assert tensor.device == self.device, f"{tensor.device} on the rank of {self.device}"

    def send(self, tensor, dst):
        self._check(tensor)

    def recv(self, tensor, src):
        self._check(tensor)
        return tensor

    recv_add = recv

    def exchange(self, send, dst, recv, src):
        self._check(send, recv)
        return recv

    def recv_any(self, tensor, sources):
        self._check(tensor)
        return min(sources)

    @property
    def can_choose(self):
        return True


@contextlib.contextmanager
def pretended(monkeypatch):
    """A context in which devices ``cuda:0``, ``cuda:1``, ... exist, without values: the mode."""
    simulated_gpu.install(monkeypatch)
    engine = _Engine()
    monkeypatch.setattr(torch.autograd.Variable, "_execution_engine", engine)
    monkeypatch.setattr(torch.autograd, "backward", engine.backward)
    monkeypatch.setattr(torch.autograd, "grad", engine.grad)
    monkeypatch.setattr(torch.Tensor, "backward", lambda tensor: engine.backward(tensor))
    monkeypatch.setattr(torch.Tensor, "data_ptr", _address)
    monkeypatch.setattr(torch.UntypedStorage, "data_ptr", lambda storage: storage._cdata)
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", _copied)
    monkeypatch.setattr(nn.Module, "to", _moved)
    monkeypatch.setattr(
        WorkQueue, "add", _one_at_a_time(WorkQueue.add, lambda work: work.done.wait())
    )
    submit = _one_at_a_time(ThreadPoolExecutor.submit, lambda future: wait([future]))
    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    # Autocast for "cuda" asks the driver what the GPU can do.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    with Gpus() as mode:
        # (The recorder alone waits for events, which it knows to be past.)
        monkeypatch.setattr(
            simulated_gpu.Stream, "synchronize", _noting(mode, "Stream.synchronize")
        )
        monkeypatch.setattr(torch.cuda, "synchronize", _noting(mode, "torch.cuda.synchronize"))
        yield mode


def _one_at_a_time(begin, until_done):
    """``begin`` hands work to a thread; here its caller waits, since threads share the mode."""

    def begin_and_wait(*args, **options):
        until_done(handle := begin(*args, **options))
        return handle

    return begin_and_wait


def _noting(mode, what):
    return lambda *_: mode._note(what, simulated_gpu.DEVICE)


def _address(tensor):
    """Instead of ``data_ptr``: two tensors without values may still be the same memory."""
    return tensor.untyped_storage()._cdata * 2**20 + tensor.storage_offset() * tensor.itemsize


def _copied(tensor, memo):
    """Instead of ``Tensor.__deepcopy__``, which copies the storage."""
    return memo.setdefault(id(tensor), _on(tensor, tensor.device))


def _moved(module, device):
    """Instead of ``Module.to``, which exchanges the contents of tensors."""
    moved = {}
    for part in module.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.device != torch.device(device):
                    tensors[name] = moved.setdefault(id(tensor), _on(tensor, device))
    return module


def _on(tensor, device):
    there = tensor.detach().to(device, copy=True)
    if not isinstance(tensor, nn.Parameter):
        return there
    return nn.Parameter(there, tensor.requires_grad)


class _Engine:
    """Autograd's engine, for tensors without values."""

    def __init__(self):
        self._callbacks = []

    def queue_callback(self, callback):
        self._callbacks.append(callback)

    def backward(self, tensors, gradients=None, **options):
        roots = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        for node, metadata in _nodes(roots):
            if hasattr(node, "variable"):
                _accumulate(node.variable)
            elif isinstance(node, torch.autograd.function.BackwardCFunction):
                with torch.no_grad():
                    node.apply(
                        *[torch.zeros(m.shape, dtype=m.dtype, device=m.device) for m in metadata]
                    )
        while self._callbacks:
            self._callbacks.pop(0)()

    def grad(self, outputs, inputs, *args, **options):
        inputs = [inputs] if isinstance(inputs, torch.Tensor) else inputs
        return tuple(map(torch.zeros_like, inputs))


def _nodes(roots):
    """The nodes of the graph, the latest first, with what is known of their outputs."""
    counter, seen, heap = itertools.count(), set(), []

    def found(node):
        if node is not None and node not in seen:
            seen.add(node)
            # Leaves first, as autograd does.
            order = -1 if hasattr(node, "variable") else -node._sequence_nr()
            heapq.heappush(heap, (order, next(counter), node))

    for root in roots:
        found(root.grad_fn)
    while heap:
        *_, node = heapq.heappop(heap)
        yield node, node._input_metadata
        for following, _ in node.next_functions:
            found(following)


def _accumulate(leaf):
    with torch.no_grad():
        gradient = torch.zeros_like(leaf)
        leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)
        for hook in list((leaf._post_accumulate_grad_hooks or {}).values()):
            hook(leaf)
