"""A checkpoint is written whole or not at all, whatever happens, and torch's own tools read it."""

import contextlib
import os
import random
import resource
import signal
import stat
import sys
import threading
import time
import traceback
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from checkpoint_parts import (
    ALONE,
    assert_equal_trees,
    everything_in,
    names,
    tensors_of,
    write,
)
from labkit.training.checkpoint.folder import Lock
from labkit.training.checkpoint.plan import Copies
from labkit.training.checkpoint.reading import read_tensors
from labkit.training.checkpoint.writing import CheckpointWriter
from ranks import travel_by_value
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from labkit import run
from labkit.errors import OutputError, WorkerError
from labkit.training.checkpoint import (
    check_folder,
    newest,
    read_facts,
    remove_unfinished,
    steps,
    why_not_whole,
)

travel_by_value(__name__)
travel_by_value("checkpoint_parts")


def odd_tensors(rank):
    """All kinds of tensors; ``model`` is the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(100_000, generator=generator)
    dtypes = [torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.bool]
    dtypes += [torch.complex64, torch.uint16, torch.float8_e4m3fn]
    kinds = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in dtypes}
    model = {
        "view": large[10:20],
        "turned": large[:12].view(3, 4).t(),
        "every third": large[:30:3],
        "one value": large[:1].expand(3, 2),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(large[5:9]),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "channels last": large[:24].view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "a.b/c é": large[:2],
    }
    model["tied"] = model["view"]
    mine = {"stage": {f"layer{rank}": torch.full((3,), float(rank))}, str(rank): large[:rank]}
    return {"model": model | kinds, "ranks": {str(rank): mine}}


def saves_odd_tensors(comm, folder):
    mine = odd_tensors(comm.rank) if comm.rank != 1 or comm.world_size != 3 else {}
    with CheckpointWriter(comm, folder) as writer:
        writer.save(1, mine, {"rank": comm.rank})


def expected_of(world_size):
    trees = [odd_tensors(rank) for rank in range(world_size) if (rank, world_size) != (1, 3)]
    return {
        "model": trees[0]["model"],
        "ranks": {k: v for t in trees for k, v in t["ranks"].items()},
    }


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_torchs_own_tools_read_what_the_ranks_have_written(world_size, tmp_path):
    folder = tmp_path / "a folder ü" / "that is not there"
    run(saves_odd_tensors, str(folder), world_size=world_size)
    assert names(folder) == [".labkit-lock", "step-00000001"]
    path, expected = newest(folder).path, expected_of(world_size)
    assert_equal_trees(read_tensors(path), expected)
    assert read_facts(path) == {"rank": 0}
    # No view brings the storage that it is a part of: 400 kB.
    assert sum(file.stat().st_size for file in path.iterdir()) < 100_000
    dcp_to_torch_save(path, tmp_path / "one.pt")
    assert_equal_trees(torch.load(tmp_path / "one.pt", weights_only=True), expected)
    empty = {"model": {name: torch.empty_like(t) for name, t in expected["model"].items()}}
    del empty["model"]["one value"]
    with pytest.warns(UserWarning, match="load in a single process"):
        dcp.load(empty, checkpoint_id=path, no_dist=True)
    for name, tensor in empty["model"].items():
        assert torch.equal(tensor, expected["model"][name]), name


# What ranks do, many cases in one run


def large(step):
    return {"model": {"weight": torch.full((50_000,), float(step))}}


def told(comm, action):
    """What every rank is told: the type and text of an error of ``action``; empty for none."""
    try:
        action()
    except (OutputError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def many_cases(comm, folder):
    found = {}
    with CheckpointWriter(comm, folder, keep=2) as writer:
        changing = large(1)
        writer.save(1, changing, {"step": 1})
        changing["model"]["weight"].zero_()
        writer.wait()
        found["copied"] = (
            read_tensors(f"{folder}/step-00000001")["model"]["weight"].unique().item()
        )
        found["steps"] = told(comm, lambda: writer.save(comm.rank, large(1), {}))
        found["shapes"] = told(
            comm, lambda: writer.save(1, {"m": {"w": torch.zeros(1 + comm.rank)}}, {})
        )
        comm.barrier()
        found["after refusals"] = names(folder)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if comm.rank == comm.world_size - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
        # Each rank writes half of this.
        two = {"a": torch.ones(50_000), "b": torch.ones(50_000)}
        writer.save(2, two, {})
        found["full"] = told(comm, writer.wait)
        comm.barrier()
        found["after full"] = names(folder)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        writer.save(3, two, {}, best=True)
        other = told(comm, lambda: CheckpointWriter(comm, folder))
        found["second run"] = other
        for step in (4, 5, 6):
            writer.save(step, large(step), {})
        writer.wait()
        found["thinned"] = names(folder)
        writer.save(6, large(60), {"again": True}, best=True)
        writer.wait()
        found["again"] = read_facts(f"{folder}/best"), names(folder)
        writer.save(7, {}, {})
    CheckpointWriter(comm, folder).close()
    found["end"] = names(folder)
    return found


def test_ranks_agree_fail_together_and_go_on(tmp_path):
    first, second = run(many_cases, str(tmp_path), world_size=2).values
    assert first == second
    assert first["copied"] == 1.0
    assert "the ranks save different checkpoints: step 0, best False on rank 0" in first["steps"]
    assert "m.w of a checkpoint differs between ranks: ['float32', [1]]" in first["shapes"]
    assert first["after refusals"] == [".labkit-lock", "step-00000001"]
    assert first["full"].startswith(
        f"OutputError: cannot write {tmp_path}/step-00000002: File too"
    )
    assert "It needs about 395 KiB, and " in first["full"]
    assert first["after full"] == first["after refusals"]
    assert "another run is writing there" in first["second run"]
    left = [f"step-0000000{step}" for step in (3, 5, 6)]
    assert first["thinned"] == [".labkit-lock", "best", *left]
    assert first["again"] == ({"again": True}, [".labkit-lock", "best", *left[1:]])
    assert first["end"] == [".labkit-lock", "best", "step-00000006", "step-00000007"]
    assert newest(tmp_path).path.name == "step-00000007"
    assert read_tensors(tmp_path / "step-00000007") == {}


def loses_a_rank(comm, folder):
    with CheckpointWriter(comm, folder) as writer:
        writer.save(1, large(1), {})
        writer.wait()
        comm.barrier()
        writer.save(2, {"a": torch.ones(3_000_000), "b": torch.ones(3_000_000)}, {})
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        writer.wait()


def test_a_rank_that_is_killed_is_named_and_the_checkpoint_before_is_left(tmp_path):
    with pytest.raises(WorkerError, match="rank 1 was killed by SIGKILL"):
        run(loses_a_rank, str(tmp_path), world_size=2)
    remove_unfinished(tmp_path)
    assert names(tmp_path) == [".labkit-lock", "step-00000001"]
    assert newest(tmp_path).path.name == "step-00000001"


# Alone: no process group is needed


def hidden(folder):
    return [name for name in names(folder) if name.startswith(".labkit-") and "lock" not in name]


def test_the_newest_and_the_best_stay_and_nothing_else_is_touched(tmp_path):
    write(tmp_path, 1, 2)
    os.unlink(tmp_path / "step-00000002" / "labkit.json")
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    # A link to a whole checkpoint does not count as one.
    (tmp_path / "step-00000035").symlink_to("step-00000001")
    (tmp_path / "step-00000004").write_text("mine")
    (tmp_path / f".labkit-{'0' * 16}.part").mkdir()
    (tmp_path / f".labkit-{'0' * 16}.part" / "notes.txt").write_text("mine")
    (tmp_path / f".labkit-{'1' * 16}.part").write_text("mine")
    before = everything_in(tmp_path)
    write(tmp_path, 10, 20, 30, 40, keep=2, best=[10])
    kept = everything_in(tmp_path)
    assert {path: kept[path] for path in before} == before
    new = {name for name in names(tmp_path) if f"{tmp_path}/{name}" not in before}
    assert new == {"best", "step-00000010", "step-00000030", "step-00000040"}
    assert os.readlink(tmp_path / "best") == "step-00000010"


def test_what_stands_at_a_checkpoints_place_is_moved_aside_whole(tmp_path):
    (damaged,) = write(tmp_path, 1)
    os.unlink(damaged / "labkit.json")
    (tmp_path / "step-00000002").write_text("mine")
    (tmp_path / "step-00000003").symlink_to("nowhere")
    before = [everything_in(damaged), "mine", "nowhere"]
    write(tmp_path, 1, 2, 3)
    aside = sorted(tmp_path.glob("step-*.old-????"))
    assert [path.name[:13] for path in aside] == [f"step-0000000{k}" for k in (1, 2, 3)]
    moved = {
        path.replace(aside[0].name, damaged.name): v for path, v in everything_in(aside[0]).items()
    }
    assert [moved, aside[1].read_text(), os.readlink(aside[2])] == before
    for step in (1, 2, 3):
        assert_equal_trees(read_tensors(tmp_path / f"step-0000000{step}"), tensors_of(step))


def test_best_is_replaced_only_if_it_is_a_link(tmp_path):
    (tmp_path / "best").mkdir()
    with pytest.raises(OutputError, match=r"best is not a link that a run has made"):
        write(tmp_path, 1, best=[1])
    assert list((tmp_path / "best").iterdir()) == []


def test_what_cannot_be_stored_is_refused_before_anything_is_written(tmp_path):
    with CheckpointWriter(ALONE, tmp_path) as writer:
        for tensors, facts, said in [
            ({"a": {"b": 3}}, {}, "a.b is of type int, which belongs to its facts"),
            (
                {"a": {1: torch.ones(1)}},
                {},
                "a key of a checkpoint must be a string, got 1 in a.1",
            ),
            (
                {"a": {"b.c": torch.ones(1)}, "a.b": {"c": torch.ones(1)}},
                {},
                "have the name a.b.c",
            ),
            ({"a": torch.eye(2).to_sparse()}, {}, "holds dense tensors: a is not one"),
            ({"a": torch.empty(2, device="meta")}, {}, "holds dense tensors: a is not one"),
            ({}, {"loss": torch.ones(1)}, "facts of a checkpoint must be what JSON can hold"),
        ]:
            with pytest.raises(ValueError, match=said):
                writer.save(1, tensors, facts)
    assert names(tmp_path) == [".labkit-lock"]


def test_a_folder_that_cannot_be_written_is_refused_before_a_run(tmp_path):
    (tmp_path / "file").touch()
    for name in ("file", "file/below", ""):
        with pytest.raises(ValueError, match=r"cannot write checkpoints to .* is not a folder"):
            check_folder(tmp_path / name if name else "")
    check_folder(tmp_path / "new" / "below")
    check_folder(tmp_path)
    assert names(tmp_path) == ["file"]
    lock = Lock(tmp_path)
    with pytest.raises(ValueError, match=r"another run is writing there\. Give this run another"):
        check_folder(tmp_path)
    lock.release()
    check_folder(tmp_path)
    with pytest.raises(OutputError, match=r"cannot write checkpoints to .*file: .*xists"):
        CheckpointWriter(ALONE, tmp_path / "file")


def test_without_permission_the_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)
    for name in ("", "new/below"):
        with pytest.raises(ValueError, match=f"no permission to write to {tmp_path}$"):
            check_folder(tmp_path / name)


def test_a_lock_is_no_link_and_no_pipe_and_not_inherited(tmp_path):
    (tmp_path / "elsewhere").touch()
    (tmp_path / ".labkit-lock").symlink_to("elsewhere")
    with pytest.raises(OutputError, match=r"\.labkit-lock: Too many levels of symbolic links"):
        Lock(tmp_path)
    os.unlink(tmp_path / ".labkit-lock")
    os.mkfifo(tmp_path / ".labkit-lock")
    with pytest.raises(OutputError, match=r"\.labkit-lock: not a plain file"):
        Lock(tmp_path)
    os.unlink(tmp_path / ".labkit-lock")
    lock = Lock(tmp_path)
    assert stat.S_IMODE((tmp_path / ".labkit-lock").stat().st_mode) == 0o600
    lock.release()


def test_a_lock_ends_with_its_process_even_if_a_child_of_it_lives_on(tmp_path):
    """Such as a DataLoader's worker."""
    ready, go = os.pipe()
    until, end = os.pipe()
    if not (owner := os.fork()):
        lock = Lock(tmp_path)
        assert lock.works
        if os.fork():
            signal.pause()
        os.close(end)
        os.write(go, b"x")
        os.read(until, 1)
        os._exit(0)
    os.read(ready, 1)
    with pytest.raises(OutputError, match="another run is writing there"):
        Lock(tmp_path)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    Lock(tmp_path).release()
    os.close(end)


def test_a_disk_that_is_too_small_is_noticed_before_it_is_filled(tmp_path, monkeypatch):
    free = SimpleNamespace(f_bavail=10, f_frsize=4096, f_blocks=100)
    write(tmp_path, 1)
    monkeypatch.setattr(os, "statvfs", lambda path: free)
    with pytest.raises(OutputError) as caught:
        write(tmp_path, 2, size=40_000)
    assert str(caught.value) == (
        f"cannot write {tmp_path}/step-00000002: No space left on device. It needs about 166 KiB, "
        "and 40 KiB are free there. The checkpoints before it are as they were"
    )
    assert names(tmp_path) == [".labkit-lock", "step-00000001"]


# Ends of every kind


def test_a_block_that_raises_leaves_nothing_unfinished(tmp_path):
    """A writing at its pace takes longer than this; giving it up takes no time."""
    with contextlib.suppress(KeyboardInterrupt), CheckpointWriter(ALONE, tmp_path) as writer:
        writer.save(1, tensors_of(1, 200_000), {})
        assert len(hidden(tmp_path)) == 1
        raise KeyboardInterrupt
    assert names(tmp_path) == [".labkit-lock"]
    assert not [t for t in threading.enumerate() if t.name == "labkit-checkpoint"]


def test_an_interrupt_while_tensors_are_copied_leaves_nothing_unfinished(tmp_path, monkeypatch):
    def interrupted(*_):
        assert len(hidden(tmp_path)) == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(Copies, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, 1)
    assert names(tmp_path) == [".labkit-lock"]


def save_until_interrupted(folder, last, *timer):
    """Write checkpoints after ``last`` until the timer interrupts it; returns the last step."""
    with contextlib.suppress(KeyboardInterrupt), CheckpointWriter(ALONE, folder, 1) as writer:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        # With an end, because an interrupt inside Python's ``__del__`` is lost.
        until_s = time.monotonic() + 2
        while time.monotonic() < until_s:
            last += 1
            writer.save(last, tensors_of(last), {})
    signal.setitimer(signal.ITIMER_REAL, 0)
    return last


def assert_newest_is_whole(folder):
    found = newest(folder)
    assert found.skipped == []
    if found.path is not None:
        assert_equal_trees(read_tensors(found.path), tensors_of(int(found.path.name[5:])))


def test_interrupts_at_any_moment_leave_nothing_unfinished(tmp_path):
    draw, last = random.Random(0), 0
    for _ in range(20):
        last = save_until_interrupted(tmp_path, last, draw.uniform(0.0005, 0.03))
        assert hidden(tmp_path) == []
        assert_newest_is_whole(tmp_path)


def test_a_storm_of_interrupts_ends_no_checkpoint_that_is_whole(tmp_path):
    """One interrupt after another, until the process ends, also while it cleans up."""
    draw, last = random.Random(0), 1
    write(tmp_path, last)
    for _ in range(10):
        timer = draw.uniform(0.0005, 0.03), draw.uniform(0.001, 0.004)
        if not (child := os.fork()):
            with contextlib.suppress(BaseException):
                save_until_interrupted(tmp_path, last, *timer)
            os._exit(0)
        os.waitpid(child, 0)
        found = newest(tmp_path).path
        assert int(found.name[5:]) >= last
        last = int(found.name[5:])
        remove_unfinished(tmp_path)
        assert hidden(tmp_path) == []
        assert_newest_is_whole(tmp_path)


@pytest.fixture(autouse=True)
def alarms_interrupt():
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# The events of Python that touch files, in a process that is to be killed at the n-th.
TOUCHING = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.listdir"}


def begin_writing(folder, first=1, begin=lambda: None, written=-1):
    """Fork a process that writes checkpoints until it is killed, a byte to a pipe after each."""
    child = os.fork()
    if not child:
        try:
            begin()
            for step in range(first, first + 10_000):
                write(folder, step, keep=1, best=[step] if step % 2 else [])
                if written >= 0:
                    os.write(written, b"x")
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return child


def assert_recovers(folder, after=0):
    """The newest is whole and equal to what was saved, and the next run cleans up."""
    before = everything_in(folder)
    found = newest(folder)
    assert found.skipped == []
    assert everything_in(folder) == before
    step = int(found.path.name[5:]) if found.path else 0
    assert step >= after
    if step:
        assert_equal_trees(read_tensors(found.path), tensors_of(step))
    # The first checkpoint is the best one before the second is begun.
    assert step < 2 or (folder / "best").is_symlink()
    if (folder / "best").is_symlink():
        best = folder / os.readlink(folder / "best")
        assert_equal_trees(read_tensors(best), tensors_of(int(best.name[5:])))
    remove_unfinished(folder)
    assert hidden(folder) == []
    assert newest(folder) == found
    # Nor is an older one half removed.
    assert [why_not_whole(path) for _, path in steps(folder)] == [""] * len(steps(folder))
    return step


def test_killed_at_every_touch_of_a_file(tmp_path):
    """One process after another, each killed one touch later than the one before."""
    reached = 0
    # What is done for the second checkpoint is done for the first and the third, too.
    for number in (*range(1, 22), *range(54, 84)):
        folder = tmp_path / str(number)
        folder.mkdir()

        def begin(number=number):
            seen = [0]

            def hook(event, _):
                if event in TOUCHING:
                    seen[0] += 1
                    if seen[0] == number:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)

        child = begin_writing(folder, begin=begin)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        reached = max(reached, assert_recovers(folder, after=0))
    assert reached >= 3


def test_killed_at_any_moment(tmp_path):
    draw = random.Random(1)
    step = 0
    for _ in range(15):
        read, written = os.pipe()
        child = begin_writing(tmp_path, step + 1, written=written)
        os.read(read, 1)
        time.sleep(draw.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        step = assert_recovers(tmp_path, after=step + 1)
        os.close(read)
        os.close(written)
