"""How ranks find an arena that no launcher has handed them, and a store that lies to them.

Honest ranks are threads of this process. A lie is told by a store that answers something else
than was written, which is what a stranger who reaches a TCPStore can make of any key.
"""

import fcntl
import os
import pickle
import re
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import warm_python
from ranks import open_descriptors

from labkit.comm import meeting
from labkit.comm.meeting import meet
from labkit.comm.shared_memory import Arena
from labkit.comm.shared_transport import SharedTransport
from labkit.errors import PeerLostError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/PID/fd")

# As /proc shows files without a name: arenas, and temporary files.
UNNAMED = "(deleted)"
NOTE, ANSWER = re.compile(r"labkit/arena/0/\d+"), re.compile(r"labkit/arena/0/\d+/\d+")


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

    def add(self, key, amount):
        return self.store.add(key, amount)

    def set(self, key, value):
        self.store.set(key, value)

    def get(self, key):
        value = self.store.get(key)
        return self.lie(value) if self.pattern.fullmatch(key) else value


def lied_to(pattern, lie, world_size=3):
    """Returns the outcome of ``meet`` on each rank when the store lies to all but rank 0."""
    store = table()
    return meet_all([store] + [Lying(store, pattern, lie) for _ in range(world_size - 1)])


@pytest.fixture(autouse=True)
def _no_file_stays_open():
    before = open_descriptors(UNNAMED)
    yield
    assert open_descriptors(UNNAMED) == before


class TestHonestRanks:
    def test_all_map_the_same_memory_and_each_time_another(self):
        store = table()
        first, second = meet_all([store] * 2), meet_all([store] * 2)
        for round_, arenas in enumerate((first, second)):
            arenas[0].board.ranks[1]["pid"] = 100 + round_
        assert [int(arena.board.ranks[1]["pid"]) for arena in first] == [100, 100]
        assert [int(arena.board.ranks[1]["pid"]) for arena in second] == [101, 101]

    def test_no_file_stays_open_but_the_mappings_own(self):
        before = open_descriptors(UNNAMED)
        arenas = meet_all([table()] * 2)
        assert open_descriptors(UNNAMED) == before + len(arenas)

    def test_what_they_map_is_for_its_owner_and_keeps_its_size(self, monkeypatch):
        kept = []
        monkeypatch.setattr(Arena, "close_file", lambda arena: kept.append(arena.descriptor))
        arenas = meet_all([table()] * 2)
        assert len(set(kept)) == 2
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


def packed(pid=1, descriptor=0, inode=1, boot=b"", mark=meeting.MARK):
    return meeting.NOTE.pack(mark, pid, descriptor, inode, boot)


NO_NOTES = {
    "nothing": b"",
    "one byte less": packed()[:-1],
    "one byte more": packed() + b"\0",
    "8 MiB": bytes(2**23),
    "not text": b"\xff\xfe\x80" * 20,
    "text": b'{"pid": 1, "descriptor": 0}',
    "another mark": packed(mark=b"labkit-9"),
    "pid 0": packed(pid=0),
    "a negative pid": packed(pid=-1),
    "a huge pid": packed(pid=2**63 - 1),
    "a negative descriptor": packed(descriptor=-1),
    "a huge descriptor": packed(descriptor=2**62),
}


class TestHostileStore:
    @pytest.mark.parametrize("note", NO_NOTES.values(), ids=NO_NOTES.keys())
    def test_what_is_no_note_is_refused_and_the_cause_is_named(self, note):
        first, *others = lied_to(NOTE, lambda _: note)
        assert all("rank 0's note in the store" in str(error) for error in others)
        assert "the answer of rank 1 is b'refused'" in str(first)
        assert all("SECURITY.md" in str(error) for error in (first, *others))

    @pytest.mark.parametrize("pattern", [NOTE, ANSWER])
    def test_a_pickle_stays_a_string_of_bytes(self, tmp_path, pattern):
        heard = lied_to(pattern, lambda _: bomb(tmp_path / "proof"))
        assert all(isinstance(error, ConnectionError) for error in heard[1:])
        assert not list(tmp_path.iterdir())

    def test_a_bomb_would_go_off(self, tmp_path):
        pickle.loads(bomb(tmp_path / "proof"))
        assert (tmp_path / "proof").read_text() == f"{os.getuid()}\n"

    @pytest.mark.parametrize("answer", [b"", b"OPEN", b"open ", b"\xff", b"x" * 2**20])
    def test_an_unknown_answer_is_refused(self, answer):
        for error in lied_to(ANSWER, lambda _: answer)[1:]:
            assert "the answer of rank 0 is" in str(error)

    def test_an_answer_for_a_rank_that_never_came_is_found_in_the_memory(self):
        store = table()
        store.set("labkit/arena/0/1/1", "open")
        with pytest.raises(ConnectionError, match=r"rank 1 has opened.*but it has not"):
            meet(store, 0, 2)

    def test_ranks_told_different_things_do_not_wait_for_each_other(self):
        store = table()
        refused = Lying(store, re.compile("labkit/arena/0/1/1"), lambda _: b"not open")
        nothing, arena = meet_all([refused, store])
        assert nothing is None
        started_s = time.monotonic()
        with pytest.raises(PeerLostError, match="rank 0 has left"):
            SharedTransport(arena, 1, timeout_s=20).recv(torch.zeros(3), 0)
        assert time.monotonic() - started_s < 10


def memory(num_bytes, seals=None):
    """An open file in memory, sealed as ``meet`` does or differently."""
    descriptor = os.memfd_create("labkit", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, meeting.seals() if seals is None else seals)
    return descriptor


def temporary(num_bytes):
    with tempfile.TemporaryFile() as file:
        file.truncate(num_bytes)
        return os.dup(file.fileno())


def named(num_bytes):
    return os.open(sys.executable, os.O_RDONLY)


def pipe(num_bytes):
    reader, writer = os.pipe()
    os.close(writer)
    return reader


ELSEWHERE = {
    "a temporary file": temporary,
    "a program": named,
    "a pipe": pipe,
    "a folder": lambda num_bytes: os.open("/", os.O_RDONLY),
    "a device": lambda num_bytes: os.open(os.devnull, os.O_RDWR),
    "memory that is too small": lambda num_bytes: memory(num_bytes - 1),
    "memory that is too large": lambda num_bytes: memory(num_bytes + 1),
    "memory that may shrink": lambda num_bytes: memory(num_bytes, fcntl.F_SEAL_GROW),
    "a launcher's arena": lambda num_bytes: memory(num_bytes, 0),
}


class TestHintsThatLeadElsewhere:
    """The note leads to another file: as between containers, or because an attacker forged it."""

    def lead(self, descriptor, pid=None, boot=None):
        inode = os.fstat(descriptor).st_ino if descriptor >= 0 else 1
        boot = meeting.boot_id() if boot is None else boot
        return packed(pid or os.getpid(), max(descriptor, 0), inode, boot)

    @pytest.mark.parametrize("make", ELSEWHERE.values(), ids=ELSEWHERE.keys())
    def test_only_what_a_meeting_makes_is_mapped_else_no_rank_uses_any(self, make):
        descriptor = make(Arena(3).num_bytes)
        try:
            note = self.lead(descriptor)
            assert lied_to(NOTE, lambda _: note) == [None] * 3
        finally:
            os.close(descriptor)

    def test_the_very_memory_of_a_meeting_would_be(self):
        """Without this, the test above could pass for another reason."""
        descriptor = memory(Arena(2).num_bytes)
        note = self.lead(descriptor)
        assert isinstance(lied_to(NOTE, lambda _: note, 2)[0], ConnectionError)
        os.close(descriptor)

    def test_a_process_that_is_gone_another_inode_and_another_machine(self):
        descriptor = memory(Arena(3).num_bytes)
        wrong = [
            self.lead(-1, pid=2**22 + 1),
            packed(os.getpid(), descriptor, 1, meeting.boot_id()),
            self.lead(descriptor, boot=bytes(36)),
            self.lead(descriptor, boot=b""),
        ]
        for note in wrong:
            assert lied_to(NOTE, lambda _, note=note: note) == [None] * 3
        os.close(descriptor)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
    def test_memory_of_another_user_is_refused_though_root_could_open_it(self):
        num_bytes = Arena(3).num_bytes
        ready, tell = os.pipe()
        wait, end = os.pipe()
        stranger = os.fork()
        if stranger == 0:
            os.close(end)
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            mine = memory(num_bytes)
            os.write(tell, struct.pack("qq", mine, os.fstat(mine).st_ino))
            os.read(wait, 1)
            os._exit(0)
        descriptor, inode = struct.unpack("qq", os.read(ready, 16))
        assert os.stat(f"/proc/{stranger}/fd/{descriptor}").st_uid == 65534
        note = packed(stranger, descriptor, inode, meeting.boot_id())
        assert lied_to(NOTE, lambda _: note) == [None] * 3
        for number in (ready, tell, wait, end):
            os.close(number)
        os.waitpid(stranger, 0)


# Two users, one machine

# Each in two rounds: the stranger looks, and lies in the second.
RANK = """
    import os, sys
    from datetime import timedelta
    import labkit, torch
    import torch.distributed as dist

    rank, port = int(sys.argv[1]), int(sys.argv[2])
    patience = timedelta(seconds=120)
    store = dist.TCPStore("127.0.0.1", port, timeout=patience)
    for round in range(2):
        if rank == 1:
            store.wait([f"the stranger is done with {round}"])
        round_store = dist.PrefixStore(f"round {round}", store)
        settings = {"rank": rank, "world_size": 2, "timeout": patience}
        dist.init_process_group("labkit", store=round_store, **settings)
        dist.all_reduce(x := torch.ones(3))
        print(x.tolist(), flush=True)
        dist.destroy_process_group()
    """

STRANGER = """
    import os, re, struct, sys, time
    from datetime import timedelta
    import torch.distributed as dist

    port, lie = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=120))
    for round in range(2):
        note = re.compile(rf".*round {round}.*labkit/arena/0/1")
        while not (found := [key for key in store.list_keys() if note.fullmatch(key)]):
            time.sleep(0.05)
        _, pid, descriptor, *_ = struct.unpack("!8sqqQ36s", store.get(found[0]))
        for number in range(descriptor + 20):
            for flags in (os.O_RDWR, os.O_RDONLY):
                try:
                    os.open(f"/proc/{pid}/fd/{number}", flags)
                    print("opened", number)
                except PermissionError:
                    pass
        if round == 1:
            store.set(found[0], lie)
        store.set(f"the stranger is done with {round}", "")
    print("uid", os.getuid(), "has written to", found[0])
    """


def output_of(script, *arguments):
    return subprocess.Popen(
        [warm_python.command(), "-c", textwrap.dedent(script), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.fresh
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
class TestSecondUser:
    """Root's ranks meet through a TCPStore; a process of user 65534 reaches it, too."""

    def test_a_stranger_cannot_open_the_memory_and_his_pickle_is_not_executed(self, tmp_path):
        proof = tmp_path / "proof"
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        programs = [output_of(RANK, rank, store.port) for rank in range(2)]
        programs.append(output_of(STRANGER, store.port, bomb(proof).hex()))
        first, second, stranger = (program.communicate(timeout=240)[0] for program in programs)
        assert first.startswith("[2.0, 2.0, 2.0]\n")
        assert second.startswith("[2.0, 2.0, 2.0]\n")
        assert stranger.startswith("uid 65534 has written to")
        assert "ConnectionError: the answer of rank 1 is b'refused'" in first
        assert "ConnectionError: rank 0's note in the store" in second
        assert not proof.exists()
