"""How ranks find an arena that no launcher has handed them, and a store that lies to them.

Honest ranks are threads of this process. A lie is told by a store that answers something else
than was written, which is what a stranger who reaches a TCPStore can make of any key.
"""

import fcntl
import os
import re
import struct
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from ranks import open_descriptors

from labkit.comm.meeting import NOTE, meet
from labkit.comm.shared_memory import Arena
from labkit.comm.shared_transport import SharedTransport
from labkit.errors import PeerLostError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/PID/fd")

# As /proc shows files without a name: arenas, and temporary files.
UNNAMED = "(deleted)"
NOTES, ANSWERS = re.compile(r"labkit/arena/0/\d+"), re.compile(r"labkit/arena/0/\d+/\d+")
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def meet_all(stores):
    """Returns for each rank what ``meet`` gives: an arena, None, or the error raised."""

    def one(rank):
        try:
            return meet(stores[rank], rank, len(stores))
        except ConnectionError as error:
            return error

    with ThreadPoolExecutor(len(stores)) as pool:
        return list(pool.map(one, range(len(stores))))


def table():
    """A store whose readers do not wait for long."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    return store


class Lying:
    """A store that answers ``lie`` where a key is asked for that matches ``pattern``."""

    def __init__(self, store, pattern, lie):
        self.store, self.pattern, self.lie = store, pattern, lie
        self.add, self.set = store.add, store.set

    def get(self, key):
        value = self.store.get(key)
        return self.lie if self.pattern.fullmatch(key) else value


def with_a_lie(pattern, lie, world_size=3):
    """Returns the outcome of ``meet`` on each rank when the store lies to all but rank 0."""
    store = table()
    return meet_all([store] + [Lying(store, pattern, lie) for _ in range(world_size - 1)])


@pytest.fixture(autouse=True)
def _no_file_stays_open():
    before = open_descriptors(UNNAMED)
    yield
    assert open_descriptors(UNNAMED) == before


def test_all_map_the_same_memory_and_each_time_another():
    store, before = table(), open_descriptors(UNNAMED)
    first, second = meet_all([store] * 2), meet_all([store] * 2)
    # Nothing but the mappings' own.
    assert open_descriptors(UNNAMED) == before + 4
    for number, arenas in enumerate((first, second)):
        arenas[0].board.ranks[1]["pid"] = 100 + number
    assert [int(arena.board.ranks[1]["pid"]) for arena in first] == [100, 100]
    assert [int(arena.board.ranks[1]["pid"]) for arena in second] == [101, 101]


def test_what_they_map_is_for_its_owner_and_keeps_its_size(monkeypatch):
    kept = []
    monkeypatch.setattr(Arena, "close_file", lambda arena: kept.append(arena.descriptor))
    arenas = meet_all([table()] * 2)
    for descriptor in set(kept):
        status = os.fstat(descriptor)
        assert (status.st_uid, status.st_mode & 0o777) == (os.geteuid(), 0o600)
        for num_bytes in (0, status.st_size + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, num_bytes)
    del arenas
    for descriptor in set(kept):
        os.close(descriptor)


def bomb(path):
    """A pickle that creates a file when it is loaded."""
    return b"cos\nsystem\n(S'id -u > " + os.fsencode(path) + b"'\ntR."


@pytest.mark.parametrize("note", [b"", NOTE.pack(1, 1)[:-1], bytes(2**23), bomb("proof")])
def test_what_is_no_note_is_refused_and_the_cause_is_named(note, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first, *others = with_a_lie(NOTES, note)
    assert all("the note of the arena in the store is" in str(error) for error in others)
    assert "the answer of rank 1 is b'refused'" in str(first)
    assert all("SECURITY.md" in str(error) for error in (first, *others))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("answer", [b"", b"OPEN", bomb("proof")])
def test_an_unknown_answer_is_refused(answer):
    for error in with_a_lie(ANSWERS, answer)[1:]:
        assert "the answer of rank 0 is" in str(error)


def test_an_answer_for_a_rank_that_never_came_is_found_in_the_memory():
    store = table()
    store.set("labkit/arena/0/1/1", "open")
    with pytest.raises(ConnectionError, match="but one has not"):
        meet(store, 0, 2)


def test_ranks_with_different_answers_do_not_wait_for_each_other():
    store = table()
    refused = Lying(store, re.compile("labkit/arena/0/1/1"), b"not open")
    nothing, arena = meet_all([refused, store])
    assert nothing is None
    started_s = time.monotonic()
    with pytest.raises(PeerLostError, match="rank 0 has left"):
        SharedTransport(arena, 1, timeout_s=20).recv(torch.zeros(3), 0)
    assert time.monotonic() - started_s < 10


# The note leads to another file: as between containers, or because an attacker forged it.


def memory(num_bytes, seals=SEALS):
    """An open file in memory, sealed as ``meet`` does or differently."""
    descriptor = os.memfd_create("labkit", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def temporary(num_bytes):
    with tempfile.TemporaryFile() as file:
        file.truncate(num_bytes)
        return os.dup(file.fileno())


ELSEWHERE = {
    "a temporary file": temporary,
    "a folder": lambda num_bytes: os.open("/", os.O_RDONLY),
    "memory that is too small": lambda num_bytes: memory(num_bytes - 1),
    "memory that is too large": lambda num_bytes: memory(num_bytes + 1),
    "memory that may shrink": lambda num_bytes: memory(num_bytes, fcntl.F_SEAL_GROW),
    "a launcher's arena": lambda num_bytes: memory(num_bytes, 0),
}


@pytest.mark.parametrize("make", ELSEWHERE.values(), ids=ELSEWHERE.keys())
def test_only_what_a_meeting_makes_is_mapped_else_no_rank_uses_any(make):
    descriptor = make(Arena(3).num_bytes)
    assert with_a_lie(NOTES, NOTE.pack(os.getpid(), descriptor)) == [None] * 3
    os.close(descriptor)


def test_the_very_memory_of_a_meeting_would_be():
    """Without this, the test above could pass for another reason."""
    descriptor = memory(Arena(2).num_bytes)
    found = with_a_lie(NOTES, NOTE.pack(os.getpid(), descriptor), 2)
    assert isinstance(found[0], ConnectionError)
    os.close(descriptor)


def test_a_process_that_is_gone():
    assert with_a_lie(NOTES, NOTE.pack(2**22 + 1, 0)) == [None] * 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_memory_of_another_user_is_refused_though_root_could_open_it():
    num_bytes = Arena(3).num_bytes
    ready, tell = os.pipe()
    wait, end = os.pipe()
    stranger = os.fork()
    if stranger == 0:
        os.close(end)
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
        os.write(tell, struct.pack("q", memory(num_bytes)))
        os.read(wait, 1)
        os._exit(0)
    (descriptor,) = struct.unpack("q", os.read(ready, 8))
    assert os.stat(f"/proc/{stranger}/fd/{descriptor}").st_uid == 65534
    assert with_a_lie(NOTES, NOTE.pack(stranger, descriptor)) == [None] * 3
    for number in (ready, tell, wait, end):
        os.close(number)
    os.waitpid(stranger, 0)
