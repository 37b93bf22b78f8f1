"""CUDA IPC without a GPU: the protocol, with stand-ins for memory and events of a GPU.

Both ends run in this process, in two threads, and the "GPU memory" is the host's. What is tested
is real: handles reach the other end, bytes arrive, and the events of a slot are used in the one
order that keeps a queued copy from being overtaken. Real devices: tests/gpu.
"""

import contextlib
import inspect
import threading
from itertools import count
from typing import ClassVar

import pytest
import torch
from ranks import wait_until
from torch.multiprocessing import reductions

from labkit.comm import cuda_ipc
from labkit.comm.board import RUNNING
from labkit.comm.comm import Comm
from labkit.comm.cuda_ipc import CudaTransport
from labkit.comm.deadlock import waits
from labkit.comm.shared_memory import NUM_SLOTS, Arena

NAMES = count()


CURRENT = threading.local()


@contextlib.contextmanager
def current(device):
    """``torch.cuda.device``: each thread has its own current device."""
    before, CURRENT.device = getattr(CURRENT, "device", None), device
    yield
    CURRENT.device = before


class Event:
    """An event that logs when it is recorded and waited for."""

    known: ClassVar[dict[bytes, "Event"]] = {}
    log: ClassVar[list[tuple[str, bytes]]] = []

    def __init__(self, interprocess=False):
        assert interprocess
        self.name = b"event %d" % next(NAMES)
        Event.known[self.name] = self

    def ipc_handle(self):
        # As in PyTorch: this makes the event, on the current device.
        Event.log.append(("made", getattr(CURRENT, "device", None)))
        return self.name

    @classmethod
    def from_ipc_handle(cls, device, handle):
        return cls.known[handle]

    def record(self, stream):
        Event.log.append(("record", self.name))


class Stream:
    def wait_event(self, event):
        Event.log.append(("wait", event.name))


@pytest.fixture
def ends(monkeypatch):
    """The transports of ranks 0 and 1, with slots of 1 KiB."""
    memory: dict[bytes, torch.Tensor] = {}

    def export(tensor):
        memory[b"slots \xff%d" % len(memory)] = tensor
        return [0, list(memory)[-1], False]

    def imported(handles, shape):
        device, handle, is_required = handles
        assert (device, is_required) == (0, False)
        assert memory[handle].shape == shape
        return memory[handle]

    monkeypatch.setattr(Event, "log", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(cuda_ipc, "export", export)
    monkeypatch.setattr(cuda_ipc, "imported", imported)
    monkeypatch.setattr(cuda_ipc, "CUDA_SEGMENT_BYTES", 1024)
    monkeypatch.setattr(cuda_ipc.CudaChannel, "segment_bytes", 1024)
    arena = Arena(2)
    return [CudaTransport(arena, rank, torch.device("cpu"), timeout_s=10) for rank in range(2)]


def together(first, second):
    """Run both functions at the same time, the first in a thread."""
    thread = threading.Thread(target=first)
    thread.start()
    second()
    thread.join(10)
    assert not thread.is_alive()


def test_a_message_of_many_segments_arrives(ends):
    sent = torch.arange(5000, dtype=torch.float32)
    received = torch.zeros(5000)
    together(lambda: ends[0].send(sent, 1), lambda: ends[1].recv(received, 0))
    assert torch.equal(received, sent)


def test_both_directions_at_once_and_a_barrier(ends):
    results = [torch.zeros(700, dtype=torch.int64) for _ in range(2)]

    def swap(rank):
        mine = torch.full((700,), rank)
        ends[rank].exchange(mine, 1 - rank, results[rank], 1 - rank)
        ends[rank].barrier()

    together(lambda: swap(0), lambda: swap(1))
    assert [int(result[699]) for result in results] == [1, 0]


def test_the_events_of_a_slot_keep_writing_and_reading_apart(ends):
    """Each slot, again and again: wait until free, write, filled; wait for that, read, free."""
    received = torch.zeros(3000)
    together(lambda: ends[0].send(torch.ones(3000), 1), lambda: ends[1].recv(received, 0))
    channel = ends[0].channel_to(1)
    for slot in range(NUM_SLOTS):
        filled, free = channel.filled_events[slot].name, channel.free_events[slot].name
        cycle = [("wait", free), ("record", filled), ("wait", filled), ("record", free)]
        used = [entry for entry in Event.log if entry[1] in (filled, free)]
        assert used
        assert used == cycle * (len(used) // 4)


def test_a_thread_makes_the_events_on_its_ranks_gpu(ends):
    """DDP's thread sends, and no thread but the first has the rank's GPU as its current one."""
    together(lambda: ends[0].send(torch.ones(3), 1), lambda: ends[1].recv(torch.ones(3), 0))
    made = [device for what, device in Event.log if what == "made"]
    assert made == [ends[0].device] * 2 * NUM_SLOTS


def test_the_fast_rings_way_opens_the_channel_too(ends):
    seen = []

    def sender():
        right = ends[0].channel_to(1)
        right.reserve(3, torch.float32).copy_(torch.tensor([1.0, 2.0, 3.0]))
        right.commit()

    def receiver():
        left = ends[1].channel_from(0)
        seen.append(left.arrive(3, torch.float32).tolist())
        left.release()

    together(sender, receiver)
    assert seen == [[1.0, 2.0, 3.0]]


def test_the_end_of_a_run_is_a_meeting_that_the_board_knows(ends):
    board = ends[0].arena.board
    board.ranks["state"] = RUNNING
    comms = [Comm(rank, 2, torch.device("cpu"), end, board) for rank, end in enumerate(ends)]

    def second():
        assert wait_until(lambda: waits(board, 0), 10)
        assert [(wait.peer, wait.op) for wait in waits(board, 0)] == [(1, "the end of the run")]
        comms[1].session.close()

    together(comms[0].session.close, second)


def test_a_letter_holds_numbers_and_handles_and_nothing_else():
    slot = torch.zeros(4096, dtype=torch.uint8)
    parts = [[0, bytes(range(256)), 2**40, True], [b"", b"handle"]]
    cuda_ipc.write_letter(slot, parts)
    assert cuda_ipc.read_letter(slot) == parts
    with pytest.raises(TypeError):
        cuda_ipc.write_letter(slot, [[object()]])
    for length in (-1, 0, 4089, 2**40):
        slot[:8] = torch.tensor([length]).view(torch.uint8)
        with pytest.raises(AssertionError):
            cuda_ipc.read_letter(slot)


def test_pytorch_rebuilds_a_tensor_from_what_is_left_out_and_what_is_sent():
    """Depends on PyTorch's order of arguments, which otherwise only a GPU would test."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    known, sent = names[: cuda_ipc.FIRST_HANDLE], names[cuda_ipc.FIRST_HANDLE :]
    assert known[:4] == ["tensor_cls", "tensor_size", "tensor_stride", "tensor_offset"]
    assert known[4:] == ["storage_cls", "dtype"]
    assert sent[0] == "storage_device"
    assert len(sent) == 9
