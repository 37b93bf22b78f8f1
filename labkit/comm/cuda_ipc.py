"""Shared memory on GPUs: ranks on one GPU, or on several of one machine, read each other's slots.

The host side is ``labkit.comm.channels``: semaphores say which end may use a slot. Here the slots
are in the sender's GPU memory, and the receiver opens them through CUDA IPC. The host does not
wait for a copy to end, so each slot also has two interprocess events: ``filled`` makes the
receiver's read wait for the sender's write, ``free`` makes the next write wait for that read.

Source: CUDA Runtime API, "Interprocess Communication" (an event opened from a handle may be
recorded and waited for in either process).
"""

import json
import struct
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from labkit.comm.channels import Channel
from labkit.comm.shared_memory import NUM_SLOTS, Arena, Semaphore
from labkit.comm.shared_transport import SharedTransport

# Copying a smaller segment would take less time than launching the copy.
CUDA_SEGMENT_BYTES = 4 * 1024 * 1024


class CudaChannel(Channel):
    """A channel whose slots are in the memory of the source's GPU.

    The source makes slots and events and writes their handles into the edge's first slot in host
    memory; the destination opens them before its first segment.
    """

    segment_bytes = CUDA_SEGMENT_BYTES

    def __init__(self, device: torch.device, *edge: Any):
        super().__init__(*edge)
        self._device = device
        self._letter = self._slots[0]
        self._is_open = self.is_sender
        if self._is_open:
            self._make()

    def _make(self) -> None:
        size = (NUM_SLOTS, CUDA_SEGMENT_BYTES)
        slots = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._slots = list(slots)
        events = [torch.cuda.Event(interprocess=True) for _ in range(2 * NUM_SLOTS)]
        # An event belongs to the GPU that is current when its handle is made, and each thread
        # has its own current GPU.
        with torch.cuda.device(self._device):
            write_letter(self._letter, [export(slots), [event.ipc_handle() for event in events]])
        self.filled_events, self.free_events = events[:NUM_SLOTS], events[NUM_SLOTS:]
        self.filled.post()

    def _open(self) -> None:
        memory, handles = read_letter(self._letter)
        self._slots = list(imported(memory, (NUM_SLOTS, CUDA_SEGMENT_BYTES)))
        events = [torch.cuda.Event.from_ipc_handle(self._device, handle) for handle in handles]
        self.filled_events, self.free_events = events[:NUM_SLOTS], events[NUM_SLOTS:]
        self._is_open = True

    def opening(self) -> Iterator[Semaphore]:
        if not self._is_open:
            yield self.filled
            self._open()

    def arrive(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        for semaphore in self.opening():
            self._wait(semaphore, self._peer)
        return super().arrive(num_elements, dtype)

    def writable(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        self._stream().wait_event(self.free_events[self._next])
        return self.slot(num_elements, dtype)

    def commit(self, begins_message: bool = True) -> None:
        self.filled_events[self._next].record(self._stream())
        super().commit(begins_message)

    def readable(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        self._stream().wait_event(self.filled_events[self._next])
        # Operands must be on one device: a slot on another GPU is copied to this one first.
        return self.slot(num_elements, dtype).to(self._device, non_blocking=True)

    def release(self) -> None:
        self.free_events[self._next].record(self._stream())
        super().release()

    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)


class CudaTransport(SharedTransport):
    """``SharedTransport`` for tensors on the GPUs of one machine.

    An operation returns when its transfer is queued on the current stream, as with NCCL.
    """

    # A peer's queued reads may still need this rank's slots, so these must not be freed yet.
    ends_together = True

    def __init__(self, arena: Arena, rank: int, device: torch.device, timeout_s: float):
        super().__init__(arena, rank, timeout_s)
        self.device = device
        self._new_channel = partial(CudaChannel, device)

    def barrier(self) -> None:
        torch.cuda.synchronize(self.device)
        super().barrier()


# PyTorch rebuilds a tensor from a list of arguments. Both ends know those before this index (type,
# shape, strides, offset, type of the storage, dtype), so only the others are sent.
FIRST_HANDLE = 6


def export(tensor: Tensor) -> list[Any]:
    """The arguments that open ``tensor``'s memory in another process: numbers and handles."""
    _, arguments = reductions.reduce_tensor(tensor)
    return list(arguments[FIRST_HANDLE:])


def imported(handles: list[Any], shape: tuple[int, int]) -> Tensor:
    """Open exported memory, as a uint8 tensor of ``shape``."""
    storage_type = torch.storage.TypedStorage
    known = Tensor, torch.Size(shape), (shape[1], 1), 0, storage_type, torch.uint8
    return reductions.rebuild_cuda_tensor(*known, *handles)


def write_letter(slot: Tensor, letter: list[list[Any]]) -> None:
    """Write ``letter`` as JSON, handles in hexadecimal, so that reading never makes objects."""
    data = json.dumps(letter, default=bytes.hex).encode("ascii")
    framed = struct.pack("q", len(data)) + data
    slot[: len(framed)] = torch.frombuffer(bytearray(framed), dtype=torch.uint8)


def read_letter(slot: Tensor) -> list[list[Any]]:
    """Read what ``write_letter`` has written."""
    (length,) = struct.unpack("q", bytes(slot[:8].numpy()))
    assert 0 < length <= len(slot) - 8
    letter = json.loads(bytes(slot[8 : 8 + length].numpy()))
    return [
        [bytes.fromhex(part) if isinstance(part, str) else part for part in parts]
        for parts in letter
    ]
