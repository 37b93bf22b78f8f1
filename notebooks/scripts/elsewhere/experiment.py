"""The experiment that all frameworks repeat, and how each worker counts its seconds and bytes.

Only NumPy and the standard library: it is imported beside PyTorch, Horovod and TensorFlow.

The model (PyTorch's names of its weights in brackets), for images [1, 8, 8] of digits 0 to 9:

    convolution 3x3, 1 to 32 channels, padding 1 (0.weight, 0.bias), SiLU, average of 2x2 pixels,
    convolution 3x3, 32 to 64 channels, padding 1 (3.weight, 3.bias), SiLU,
    flattened in the order channel, row, column to 1024, linear to 10 (6.weight, 6.bias)

The loss is the mean cross-entropy of the global batch; SGD with momentum, without weight decay:
``velocity = momentum * velocity + gradient``, ``weight -= lr * velocity``.
"""

import json
import os
import socket
import struct
import time
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Experiment:
    """The batches, the initial weights and the settings.

    Attributes:
        images: float32 [steps, batch, 1, 8, 8], in the order channel, row, column.
        labels: int64 [steps, batch].
        weights: float32, by PyTorch's name; a convolution's are [out, in, 3, 3], the linear
            layer's [out, in].
        lr, momentum: of SGD.
    """

    images: np.ndarray
    labels: np.ndarray
    weights: dict
    lr: float
    momentum: float

    @classmethod
    def load(cls, path):
        """Read the experiment from an ``.npz`` file."""
        with np.load(path) as file:
            kept = {name: file[name] for name in file.files}
        weights = {n.removeprefix("weight/"): kept[n] for n in kept if n.startswith("weight/")}
        rates = float(kept["lr"]), float(kept["momentum"])
        return cls(kept["images"], kept["labels"], weights, *rates)

    @property
    def steps(self):
        """How many batches there are, one per step."""
        return len(self.images)

    def share(self, rank, size, step):
        """(images, labels) of this worker's contiguous part of a batch.

        Raises:
            ValueError: the parts would differ in size, so that the mean of the workers' means
                would not be the mean of the batch.
        """
        batch = self.labels.shape[1]
        if batch % size:
            raise ValueError(f"a batch of {batch} in {size} parts: use a divisor of {batch}")
        part = slice(rank * batch // size, (rank + 1) * batch // size)
        return self.images[step, part], self.labels[step, part]


class Measured:
    """Seconds and sent bytes of every step of this process: ``with measured: ...``.

    Attributes:
        step_s: seconds, one per step.
        sent_bytes: bytes that this process has sent over TCP, one number per step.
    """

    def __init__(self):
        self.step_s, self.sent_bytes = [], []

    def __enter__(self):
        self._sent = sent_bytes()
        self._start_s = time.perf_counter()
        return self

    def __exit__(self, kind, error, trace):
        self.step_s.append(time.perf_counter() - self._start_s)
        self.sent_bytes.append(sent_bytes() - self._sent)


# Where Linux keeps these numbers in struct tcp_info (linux/tcp.h, since 4.19).
_NOT_YET_SENT, _SENT_AND_AGAIN = 144, 200
# {number of the socket: bytes}, so that those of a socket that is closed later still count.
_sent = {}


def sent_bytes():
    """Bytes that this process has sent over its TCP sockets so far, as the kernel counts them.

    The same for every framework: what was written to a socket, headers of TCP not included. Of
    a socket that is closed, what it had sent at the reading before counts.

    Raises:
        OSError: this kernel does not count.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            # A copy, as the other threads may close the socket now.
            copy = os.dup(int(name))
        except OSError:
            continue
        try:
            _read(copy)
        finally:
            os.close(copy)
    return sum(_sent.values())


def _read(descriptor):
    try:
        own = socket.socket(fileno=descriptor)
    except OSError:  # a file or a pipe
        return
    try:
        if own.family not in (socket.AF_INET, socket.AF_INET6) or own.type != socket.SOCK_STREAM:
            return
        info = own.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    finally:
        own.detach()
    if len(info) < _SENT_AND_AGAIN + 16:
        raise OSError("this kernel does not count the bytes of a TCP socket: use Linux 4.19")
    (waiting,) = struct.unpack_from("I", info, _NOT_YET_SENT)
    sent, again = struct.unpack_from("QQ", info, _SENT_AND_AGAIN)
    number = os.fstat(descriptor).st_ino
    _sent[number] = max(_sent.get(number, 0), waiting + sent - again)


def report(path, *, losses, step_s, sent_bytes, versions, worker=0):
    """Write this worker's report: worker 0 to ``path``, worker N to ``path.N``.

    Args:
        losses: of every step, the mean over the global batch before the update; those of
            worker 0 are read.
        step_s: seconds of every step; those of worker 0 are read.
        sent_bytes: bytes of every step, of this worker; or ``{process: bytes of every step}``,
            where one process tells those of several.
        versions: for example ``{"torch": torch.__version__}``.
    """
    by_process = sent_bytes if isinstance(sent_bytes, dict) else {f"worker {worker}": sent_bytes}
    told = {
        "worker": worker,
        "losses": [float(loss) for loss in losses],
        "step_s": [float(seconds) for seconds in step_s],
        "sent_bytes": {name: [int(one) for one in each] for name, each in by_process.items()},
        "versions": versions,
    }
    path = f"{path}.{worker}" if worker else str(path)
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(told, file)
    os.replace(f"{path}.part", path)
