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
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks import open_descriptors

from labkit.engine.comm.rendezvous import map_arena
from labkit.engine.comm.shared_memory import Arena

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/PID/fd")

# As /proc shows files without a name: arenas, and temporary files.
UNNAMED = "(deleted)"
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Lying:
    """A store that answers ``lie`` where the note of an arena is asked for."""

    def __init__(self, store, lie):
        self.store, self.lie = store, lie
        self.add, self.set = store.add, store.set

    def get(self, key):
        value = self.store.get(key)
        return self.lie if re.fullmatch(r"labkit/arena/0/\d+", key) else value


def map_all(world_size, lie=None):
    """What ``map_arena`` gives by rank; with a ``lie`` the store tells it to all but rank 0."""
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=10))
    stores = [store] + [store if lie is None else Lying(store, lie)] * (world_size - 1)
    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(map_arena, stores, range(world_size), [world_size] * world_size))


@pytest.fixture(autouse=True)
def _no_file_stays_open():
    before = open_descriptors(UNNAMED)
    yield
    assert open_descriptors(UNNAMED) <= before


def test_all_map_the_same_memory_which_is_for_its_owner_and_keeps_its_size(monkeypatch):
    kept = []
    monkeypatch.setattr(Arena, "close_file", lambda arena: kept.append(arena.descriptor))
    first, second = arenas = map_all(2)
    first.board.ranks[1]["pid"] = 100
    assert second.board.ranks[1]["pid"] == 100
    for descriptor in set(kept):
        status = os.fstat(descriptor)
        assert (status.st_uid, status.st_mode & 0o777) == (os.geteuid(), 0o600)
        for num_bytes in (0, status.st_size + 1):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, num_bytes)
    del first, second, arenas
    for descriptor in set(kept):
        os.close(descriptor)


def bomb(path):
    """A pickle that creates a file when it is loaded."""
    return b"cos\nsystem\n(S'id -u > " + os.fsencode(path) + b"'\ntR."


@pytest.mark.parametrize(
    "note", [b"", b"1", bytes(2**23), bomb("proof"), f"{2**22 + 1} 0".encode()]
)
def test_what_is_no_note_or_of_a_process_that_is_gone_is_not_used(note, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert map_all(3, note) == [None] * 3
    assert not list(tmp_path.iterdir())


# The note leads to another file: as between containers, or because an attacker forged it.


def memory(num_bytes, seals=SEALS):
    """An open file in memory, sealed as ``map_arena`` does or differently."""
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
    "what a rendezvous makes": memory,
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_only_what_a_rendezvous_makes_is_mapped_else_no_rank_uses_any(what):
    descriptor = ELSEWHERE[what](Arena(3).num_bytes)
    found = map_all(3, f"{os.getpid()} {descriptor}".encode())
    assert (found == [None] * 3) == (what != "what a rendezvous makes")
    os.close(descriptor)


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
    assert map_all(3, f"{stranger} {descriptor}".encode()) == [None] * 3
    for number in (ready, tell, wait, end):
        os.close(number)
    os.waitpid(stranger, 0)
