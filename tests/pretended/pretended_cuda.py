"""The parts of ``torch.cuda`` that need a GPU, for ``pretended_gpus``."""

import time
import uuid
from collections import defaultdict
from types import SimpleNamespace

import pretended_gpus as gpus
import torch

MEMORY_BYTES = 16 * 2**30
_allocated = defaultdict(int)
_peak = defaultdict(int)


class Held:
    """A storage's device; it counts the GPU's memory in use as long as it lives."""

    __slots__ = ("device", "num_bytes")

    def __init__(self, device, num_bytes):
        self.device, self.num_bytes = device, num_bytes
        if device.type == "cuda":
            # The allocator hands out multiples of 512 bytes.
            self.num_bytes = -(-num_bytes // 512) * 512
            _allocated[device.index] += self.num_bytes
            _peak[device.index] = max(_peak[device.index], _allocated[device.index])

    def __del__(self):
        if self.device.type == "cuda":
            _allocated[self.device.index] -= self.num_bytes


class Stream:
    """A stream on which everything has been done."""

    def __init__(self, device=None, **options):
        self.device = gpus.resolved("cuda" if device is None else device)
        self.device_index, self.stream_id, self.cuda_stream = self.device.index, 0, 0

    def wait_event(self, event):
        assert isinstance(event, Event), event

    def wait_stream(self, stream):
        assert isinstance(stream, Stream), stream

    def record_event(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self):
        gpus.initialize()

    def is_capturing(self):
        return False

    def __enter__(self):
        self._context = StreamContext(self)
        self._context.__enter__()
        return self

    def __exit__(self, *error):
        self._context.__exit__()


class Event:
    """An event: when it was recorded, by the host's clock, and of which GPU."""

    def __init__(self, enable_timing=False, **options):
        self._recorded_s = self.device = None

    def record(self, stream=None):
        stream = torch.cuda.current_stream() if stream is None else stream
        self.device, self._recorded_s = stream.device, time.perf_counter()

    def wait(self, stream=None):
        gpus.initialize()

    def query(self):
        return True

    def synchronize(self):
        gpus.initialize()

    def elapsed_time(self, end):
        """Milliseconds."""
        if self.device != end.device:
            raise RuntimeError("CUDA error: invalid resource handle (events of two GPUs)")
        return (end._recorded_s - self._recorded_s) * 1e3


class StreamContext:
    """``torch.cuda.stream(s)``: makes a stream, and its GPU, this thread's current ones."""

    def __init__(self, stream):
        self.stream = stream

    def __enter__(self):
        if self.stream is None:
            return
        self._device = gpus.make_current(self.stream.device_index)
        self._before = _streams().get(self.stream.device_index)
        _streams()[self.stream.device_index] = self.stream

    def __exit__(self, *error):
        if self.stream is None:
            return
        _streams()[self.stream.device_index] = self._before
        gpus.make_current(self._device)


def _streams():
    if not hasattr(gpus._state, "streams"):
        gpus._state.streams = {}
    return gpus._state.streams


_default_streams = {}


def default_stream(device=None):
    index = gpus.resolved("cuda" if device is None else device).index
    if index not in _default_streams:
        _default_streams[index] = Stream(torch.device("cuda", index))
    return _default_streams[index]


def current_stream(device=None):
    index = gpus.resolved("cuda" if device is None else device).index
    return _streams().get(index) or default_stream(index)


def set_stream(stream):
    if stream is not None:
        gpus.make_current(stream.device_index)
        _streams()[stream.device_index] = stream


def get_device_properties(device=None):
    device = gpus.resolved("cuda" if device is None else device)
    return SimpleNamespace(
        name="Pretended GPU",
        major=9,
        minor=0,
        total_memory=MEMORY_BYTES,
        multi_processor_count=132,
        uuid=uuid.UUID(int=device.index),
    )


def set_device(device):
    gpus.make_current(gpus.resolved(device).index)


def current_device():
    gpus.initialize()
    return gpus.current()


def synchronize(device=None):
    gpus.resolved("cuda" if device is None else device)


def _index(device):
    return gpus.current() if device is None else gpus.resolved(device).index


def memory_allocated(device=None):
    return _allocated[_index(device)]


def max_memory_allocated(device=None):
    return _peak[_index(device)]


def reset_peak_memory_stats(device=None):
    _peak[_index(device)] = _allocated[_index(device)]


def install():
    """Put these names into ``torch.cuda``, its submodules that took some, and ``accelerator``."""
    cuda = torch.cuda
    nothing = dict.fromkeys(("empty_cache", "ipc_collect", "init"), lambda: None)
    ours = {name: globals()[name] for name in _PUBLIC} | nothing
    ours |= {
        "device_count": gpus.num_gpus,
        "is_available": lambda: gpus.num_gpus() > 0,
        "is_initialized": gpus.is_initialized,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": gpus.in_bad_fork,
        "_lazy_init": gpus.initialize,
        "_exchange_device": gpus.make_current,
        "_maybe_exchange_device": gpus.make_current,
        "stream": StreamContext,
        "is_current_stream_capturing": lambda: False,
        "get_device_capability": lambda device=None: (9, 0),
        "default_generators": tuple(torch._C.Generator() for _ in range(gpus.num_gpus())),
    }
    for name, value in ours.items():
        setattr(cuda, name, value)
        for module in (cuda.memory, cuda.random, cuda.graphs):
            if hasattr(module, name):
                setattr(module, name, value)
    accelerator = {
        "is_available": ours["is_available"],
        "device_count": gpus.num_gpus,
        "current_accelerator": _current_accelerator,
        "current_device_index": current_device,
        "set_device_index": set_device,
        "current_stream": current_stream,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
    }
    for name, value in accelerator.items():
        setattr(torch.accelerator, name, value)
    for name in ("_accelerator_exchangeDevice", "_accelerator_maybeExchangeDevice"):
        setattr(torch._C, name, gpus.make_current)
    torch._C._cuda_hasPrimaryContext = lambda index: _peak[index] > 0


def _current_accelerator(check_available=False):
    return torch.device("cuda") if gpus.num_gpus() or not check_available else None


_PUBLIC = (
    *("Stream", "Event", "StreamContext", "default_stream", "current_stream", "set_stream"),
    *("get_device_properties", "set_device", "current_device", "synchronize"),
    *("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"),
)
