"""A GPU of streams and events without kernels: each stream is a clock, and the host takes no time.

A kernel makes its stream later; an event is the time of its stream; a stream that waits for an
event is at least as late. So what overlaps on a GPU overlaps here, to the millisecond.
"""

import threading
from types import SimpleNamespace

import torch

DEVICE = torch.device("cuda:0")
_own = threading.local()


class Stream:
    def __init__(self, device=DEVICE, priority=0):
        self.device, self.at_ms = device, 0.0

    def wait_event(self, event):
        self.at_ms = max(self.at_ms, event.at_ms)

    def wait_stream(self, stream):
        self.wait_event(stream.record_event())

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        """Nothing: the host is as late as it has to be."""


class Event:
    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.at_ms, self.device = 0.0, DEVICE

    def record(self, stream=None):
        self.at_ms = (stream or current_stream()).at_ms

    def elapsed_time(self, end):
        return end.at_ms - self.at_ms

    def query(self):
        return True

    def synchronize(self):
        """Nothing, as for a stream."""


def current_stream(device=DEVICE):
    return getattr(_own, "stream", None) or _default.stream


def set_stream(stream):
    _own.stream = stream


def kernel(ms):
    """Run a kernel on this thread's current stream."""
    current_stream().at_ms += ms


_default = SimpleNamespace(stream=Stream())


def install(monkeypatch):
    """Let ``torch.cuda`` be this GPU for a test; its tensors stay in the host's memory."""
    monkeypatch.setattr(_default, "stream", Stream())
    for name in ("Stream", "Event", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, globals()[name])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
