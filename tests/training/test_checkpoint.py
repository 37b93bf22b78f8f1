"""A checkpoint is written whole or not at all, and what is not whole is skipped and named."""

import json
import os
import resource
import shutil
import signal
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from labkit.errors import OutputError
from labkit.training.checkpoint import (
    Facts,
    Stored,
    newest,
    prepare,
    read_facts,
    remove_unfinished,
    save,
    steps,
    why_not_whole,
)

ROW = {"loss": 0.5, "seconds": 0.1, "test_accuracy": float("nan")}
BEGIN = Facts(0, 0, 10, [], {}, {}, {})
ALONE = SimpleNamespace(rank=0, world_size=1, barrier=lambda: None)


def at(step):
    """The facts after so many steps, ten in an epoch."""
    epoch, rest = divmod(step, 10)
    return replace(BEGIN, epoch=epoch, step=rest, rows=[ROW] * epoch)


def tensors_of(step):
    large = torch.full((4, 6), float(step))
    kinds = [torch.float64, torch.bfloat16, torch.int64, torch.bool]
    return {
        "model/turned": large.t(),
        "model/part": large[1:2],
        "model/tied": large,
        "model/scalar": torch.tensor(2.5),
        "model/empty": torch.empty(0, 3),
        "model/nothing": torch.empty(0),
        **{f"own/{kind}": torch.arange(6).to(kind) for kind in kinds},
    }


def write(folder, *at_steps, best=()):
    prepare(ALONE, folder)
    for step in at_steps:
        save(ALONE, folder, at(step), tensors_of(step), {"step": step}, step in best)


def test_what_was_saved_is_read(tmp_path):
    prepare(ALONE, tmp_path / "new" / "run")
    save(
        ALONE, tmp_path / "new" / "run", at(13), tensors_of(3), {"rate": 0.3, "nan": float("nan")}
    )
    path, skipped = newest(tmp_path / "new" / "run")
    stored = Stored(path)
    assert (path.name, skipped) == ("step-00000013", [])
    assert (stored.facts.epoch, stored.facts.step, len(stored.facts.rows)) == (1, 3, 1)
    assert stored.numbers[0]["rate"] == 0.3
    found = stored.of_all("model") | stored.of_rank(0, "own")
    for name, tensor in tensors_of(3).items():
        assert torch.equal(found[name.partition("/")[2]], tensor), name
        assert found[name.partition("/")[2]].dtype == tensor.dtype


def test_the_newest_two_and_the_best_stay_and_nothing_of_others_goes(tmp_path):
    write(tmp_path, 10, 20, 30, 40, best=(20,))
    assert [step for step, _ in steps(tmp_path)] == [40, 30, 20]
    assert (tmp_path / "best").resolve().name == "step-00000020"
    (tmp_path / "step-00000030" / "notes.txt").write_text("mine")
    shutil.copytree(tmp_path / "step-00000040", tmp_path / ".step-00000005.part")
    other = tmp_path / "other"
    other.mkdir()
    (tmp_path / ".step-00000001.part").symlink_to(other)
    write(tmp_path, 50, 60, best=(60,))
    assert [step for step, _ in steps(tmp_path)] == [60, 50, 30]
    assert (tmp_path / "step-00000030" / "notes.txt").read_text() == "mine"
    assert other.is_dir()
    assert not list(tmp_path.glob(".*"))


def facts(**changes):
    def damage(path):
        found = json.loads((path / "facts.json").read_text()) | changes
        found = {name: value for name, value in found.items() if value is not ...}
        (path / "facts.json").write_text(json.dumps(found))

    return damage


def instead(name, put):
    def damage(path):
        (path / name).rename(path / "x")
        put(path / name)

    return damage


def link(path):
    path.symlink_to("x")


PART = "rank0.safetensors"
DAMAGE = {
    "No such file": lambda path: (path / "facts.json").unlink(),
    "JSONDecodeError": lambda path: (path / "facts.json").write_text('{"epoch": 1'),
    "its format is 1, and this version of labkit reads 3": facts(format=1),
    "object has no attribute": lambda path: (path / "facts.json").write_text("[]"),
    "argument: 'epoch'": facts(epoch=...),
    "describe": facts(epoch=-1),
    "does not describe": facts(rows=[{"loss": "low"}] * 2),
    "does not describe this": facts(files={"../rank0.safetensors": 3}),
    "Too many": instead("facts.json", link),
    "facts.json is missing or damaged": instead("facts.json", os.mkfifo),
    f"{PART} is not a file": instead(PART, link),
    r"has \d+ bytes, and \d+ were written": lambda path: os.truncate(path / PART, 99),
    f"{PART} cannot be read: No such": lambda path: (path / PART).unlink(),
    "it is a link": lambda path: (
        path.rename(path.with_name("x")),
        path.symlink_to(path.with_name("x")),
    ),
}


@pytest.mark.parametrize("why", DAMAGE)
def test_a_damaged_or_forged_checkpoint_is_named_and_the_one_before_it_taken(tmp_path, why):
    write(tmp_path, 10, 20)
    DAMAGE[why](tmp_path / "step-00000020")
    path, (said,) = newest(tmp_path)
    assert path.name == "step-00000010"
    assert said.startswith("step-00000020: ")
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(said)


def test_a_file_of_the_right_size_that_is_damaged_inside(tmp_path):
    write(tmp_path, 10)
    file = tmp_path / "step-00000010" / PART
    file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(ValueError, match=r"step-00000010 is damaged"):
        Stored(tmp_path / "step-00000010")
    # Of another program: without the numbers of a rank.
    save_file({"model/a": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"step-00000010 is damaged"):
        Stored(tmp_path / "step-00000010")


def test_one_is_whole_when_all_ranks_have_written(tmp_path):
    meet = threading.Barrier(2)
    first, second = (SimpleNamespace(rank=r, world_size=2, barrier=meet.wait) for r in (0, 1))
    own = {"own/b": torch.zeros(2)}
    other = threading.Thread(target=save, args=(second, tmp_path, at(10), own, {}))
    other.start()
    save(first, tmp_path, at(10), {"model/a": torch.ones(2)}, {})
    other.join()
    assert Stored(newest(tmp_path).path).of_all("own").keys() == {"b"}
    # A rank that is lost leaves nothing that counts.
    threading.Timer(0.2, meet.abort).start()
    with pytest.raises(threading.BrokenBarrierError):
        save(first, tmp_path, at(20), {"model/a": torch.ones(2)}, {})
    assert newest(tmp_path) == (tmp_path / "step-00000010", [])
    remove_unfinished(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_a_full_disk_leaves_the_older_checkpoint(tmp_path):
    write(tmp_path, 10)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with pytest.raises(OutputError, match=f"cannot write a checkpoint to {tmp_path}"):
            save(ALONE, tmp_path, at(20), {"model/a": torch.ones(1000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    remove_unfinished(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert why_not_whole(tmp_path / "step-00000010") == ""


def test_a_damaged_one_of_the_same_name_is_kept_aside(tmp_path):
    write(tmp_path, 10, 20)
    (tmp_path / "step-00000020" / "facts.json").unlink()
    write(tmp_path, 20)
    assert read_facts(tmp_path / "step-00000020").epoch == 2
    assert len(list(tmp_path.glob("step-00000020.old-*"))) == 1
