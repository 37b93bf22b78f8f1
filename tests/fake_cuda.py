"""Pretended GPUs for tests in one process: events, streams and two clocks, without any waiting.

Time is a number that the test moves. Each GPU has a clock of its own, which starts elsewhere and
may drift; the difference of two events is a float32 of milliseconds, as CUDA's is. A stream works
off what is queued on it, first in, first out, and the host does not wait for it, except in the
calls that wait on a real GPU too: these are counted.

    machine = fake_cuda.install(monkeypatch)
    machine.stream("cuda:0").work(0.2)         # queued: the host goes on at once
    machine.pass_s(1.0)                        # the host does something else for a second
    machine.waits == []                        # nobody has waited for a GPU
"""

import contextlib
import threading
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch

import labkit.tracing.recorder


def index_of(device):
    """The number of a GPU, by whichever name PyTorch takes; None is cuda:0."""
    if isinstance(device, int):
        return device
    return torch.device(device or "cuda").index or 0


class Stream:
    """First in, first out; ``free_s`` is when all that is queued so far will have ended."""

    def __init__(self, device=None, priority=0, *, machine=None):
        self.machine = machine or Machine.installed
        self.device = torch.device("cuda", index_of(device))
        self.free_s = 0.0

    def work(self, seconds):
        """Queue a kernel or a copy that takes so long."""
        self.free_s = max(self.free_s, self.machine.now_s) + seconds

    def wait_event(self, event):
        self.free_s = max(self.free_s, event.at_s)

    def wait_stream(self, stream):
        self.free_s = max(self.free_s, stream.free_s)

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def query(self):
        return self.free_s <= self.machine.now_s

    def synchronize(self):
        self.machine.wait_until(self.free_s, "Stream.synchronize")


class Event:
    """A moment on a stream; it may be recorded again, as a real one."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False):
        self.machine = Machine.installed
        self.machine.num_events += 1
        self.enable_timing = enable_timing
        self.device, self.at_s = None, 0.0

    def record(self, stream=None):
        stream = stream or current_stream()
        assert self.device in (None, stream.device), "an event belongs to one device"
        self.machine.pass_s(self.machine.call_s)
        self.device = stream.device
        self.at_s = max(stream.free_s, self.machine.now_s)

    def wait(self, stream=None):
        (stream or current_stream()).wait_event(self)

    def query(self):
        return self.at_s <= self.machine.now_s

    def synchronize(self):
        self.machine.wait_until(self.at_s, "Event.synchronize")
        self.machine.pass_s(self.machine.call_s)

    def elapsed_time(self, end):
        if not (self.enable_timing and end.enable_timing and self.query() and end.query()):
            raise RuntimeError("both events must be recorded for timing, and completed")
        if self.device != end.device:
            raise RuntimeError("invalid resource handle: events of two devices")
        clock_s = self.machine.gpu_clock_s
        difference_s = clock_s(end.at_s, self.device) - clock_s(self.at_s, self.device)
        return float(np.float32(1e3 * difference_s))


class Machine:
    """The host's clock, and the GPUs.

    Attributes:
        now_s: the host's time.
        call_s: how long a call of CUDA takes on the host.
        drift: by GPU, how much faster its clock runs than the host's.
        waits: the calls so far that wait for a GPU.
        num_events: how many events were made.
    """

    installed = None

    def __init__(self, now_s=1000.0):
        self.now_s, self.call_s = now_s, 2e-6
        self.drift = defaultdict(float)
        self.waits = []
        self.num_events = 0
        self._streams = {}
        self._current = threading.local()

    def pass_s(self, seconds):
        self.now_s += seconds

    def wait_until(self, at_s, call):
        self.waits.append(call)
        self.now_s = max(self.now_s, at_s)

    def gpu_clock_s(self, at_s, device):
        """A GPU's own clock at a moment of the host's."""
        return 77.0 * (1 + device.index) + at_s * (1 + self.drift[device.index])

    def stream(self, device="cuda:0"):
        """The default stream of a GPU."""
        index = index_of(device)
        return self._streams.setdefault(index, Stream(index, machine=self))

    def current(self, device):
        chosen = getattr(self._current, "streams", {})
        return chosen.get(index_of(device)) or self.stream(device)

    @contextlib.contextmanager
    def use(self, stream):
        """``torch.cuda.stream``: this thread's current stream in the block."""
        if stream is None:
            yield
            return
        before = dict(getattr(self._current, "streams", {}))
        self._current.streams = before | {stream.device.index: stream}
        try:
            yield
        finally:
            self._current.streams = before

    def synchronize(self, device=None):
        """All queued work of all default and current streams of a GPU."""
        streams = [self.stream(device), self.current(device)]
        self.wait_until(max(stream.free_s for stream in streams), "cuda.synchronize")

    def clock(self):
        """What replaces the module ``time`` where the host's clock is read."""
        return SimpleNamespace(perf_counter=lambda: self.now_s, sleep=self.pass_s)


def current_stream(device=None):
    return Machine.installed.current(device)


@contextlib.contextmanager
def _device(device):
    yield


def install(monkeypatch, now_s=1000.0):
    """Put a machine with GPUs in the place of CUDA until the test ends."""
    machine = Machine(now_s)
    monkeypatch.setattr(Machine, "installed", machine)
    replaced = {"Event": Event, "Stream": Stream, "current_stream": current_stream}
    replaced |= {"stream": machine.use, "synchronize": machine.synchronize, "device": _device}
    for name, value in replaced.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(labkit.tracing.recorder, "time", machine.clock())
    return machine
