"""A transport that queues, as NCCL does: for tests of everything that runs over such a stream.

gloo behind one thread per rank. send, recv and exchange return at once and are carried out in one
order, first in first out; only a flush waits. A tensor on the CPU can be read at any time, so
whatever a thread of the rank does with a tensor of a queued operation waits for that operation, as
the next kernel on the same stream would; all else runs ahead.
"""

import contextlib
import functools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ranks import travel_by_value
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from labkit import gpus
from labkit.comm.torch_transport import TorchTransport
from labkit.comm.transport import Transport
from labkit.runtime import launch

travel_by_value(__name__)

STREAM = "fifo-stream"


class FifoTransport(Transport):
    """``inner`` carried out by one thread, in the order of the calls."""

    def __init__(self, inner):
        super().__init__()
        self._inner = inner
        settings = {"thread_name_prefix": STREAM, "initializer": torch.set_grad_enabled}
        self._stream = ThreadPoolExecutor(1, **settings, initargs=(False,))
        # By the address of its memory, the latest operation on a tensor, and that tensor.
        self._latest = {}

    def do(self, tensors, operation, *args):
        work = self._stream.submit(operation, *args)
        for address in [at for at, (one, _) in list(self._latest.items()) if one.done()]:
            self._latest.pop(address, None)
        for tensor in tensors:
            self._latest[tensor.untyped_storage().data_ptr()] = work, tensor
        return work

    def send(self, tensor, dst):
        self.do([tensor], self._inner.send, tensor, dst)
        self.sent.to[dst].count(tensor.nbytes)

    def recv(self, tensor, src):
        self.do([tensor], self._inner.recv, tensor, src)

    def exchange(self, send, dst, recv, src):
        self.do([send, recv], self._inner.exchange, send, dst, recv, src)
        self.sent.to[dst].count(send.nbytes)

    def barrier(self):
        self.do([], self._inner.barrier).result()

    def wait_for(self, tensors):
        """Wait for the operations on these tensors' memory."""
        found = []
        for tensor in tensors:
            with contextlib.suppress(RuntimeError):  # a tensor without memory of its own
                found.append(self._latest.get(tensor.untyped_storage().data_ptr()))
        for work, _ in filter(None, found):
            work.result()

    def set_timeout(self, timeout_s):
        self._inner.set_timeout(timeout_s)

    def abandon(self):
        self._inner.abandon()

    def close(self):
        self._stream.shutdown(wait=False)
        self._inner.close()


class AfterTheStream(TorchDispatchMode):
    """Each operation of PyTorch on a tensor comes after the stream's operations on its memory."""

    def __init__(self, session):
        super().__init__()
        self._session = session

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not getattr(func, "is_view", False):
            tensors = [one for one in tree_iter((args, kwargs)) if isinstance(one, torch.Tensor)]
            self._session.transport.wait_for(tensors)
        return func(*args, **(kwargs or {}))


def over_stream(comm):
    """Let this rank's comm send its messages over a stream, from now on."""
    inner = TorchTransport("gloo", comm.device)
    board = comm.session.board
    comm.__init__(comm.rank, comm.world_size, comm.device, FifoTransport(inner), board)
    comm.session.start_together()
    # As a CUDA device is waited for.
    gpus.synchronize = lambda device: comm.transport.do([], int).result()
    # They read the memory without an operation of PyTorch.
    for name in ("tolist", "numpy"):
        read = getattr(torch.Tensor, name)
        setattr(torch.Tensor, name, lambda one, read=read: (one.clone(), read(one))[1])
    really_begin = threading.Thread._bootstrap_inner

    def begin(thread):
        if thread.name.startswith(STREAM):
            really_begin(thread)
        else:
            with AfterTheStream(comm.session):
                really_begin(thread)

    threading.Thread._bootstrap_inner = begin


def call_over_stream(fn, comm, *args):
    over_stream(comm)
    with AfterTheStream(comm.session):
        return fn(comm, *args)


@pytest.fixture
def over_streams(monkeypatch):
    """The ranks of all runs of a test talk over a FifoTransport."""
    really_dump = launch.dump_call

    def dump(fn, args):
        return really_dump(functools.partial(call_over_stream, fn), args)

    monkeypatch.setattr(launch, "dump_call", dump)
