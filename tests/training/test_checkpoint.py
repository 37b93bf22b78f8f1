"""A checkpoint is written whole or not at all, and what is not whole is skipped and named."""

import json
import os
import resource
import shutil
import signal
import time
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from labkit.errors import OutputError
from labkit.training.checkpoint import (
    Facts,
    Stored,
    Writer,
    newest,
    read_facts,
    remove_unfinished,
    steps,
    why_not_whole,
)

ROW = {"loss": 0.5, "seconds": 0.1, "test_accuracy": float("nan")}
BEGIN = Facts(0, 0, 10, [], {}, {}, {}, {}, {})


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
        "model/scalar": torch.tensor(2.5),
        "model/empty": torch.empty(0, 3),
        **{f"own/{kind}": torch.arange(6).to(kind) for kind in kinds},
    }


def write(folder, *at_steps, best=()):
    writer = Writer(folder, 0, 1)
    for step in at_steps:
        writer.save(at(step), tensors_of(step), {"step": step}, step in best)
    writer.close(failed=False)


def test_what_was_saved_is_read_and_later_changes_are_not(tmp_path):
    tensors = tensors_of(3)
    writer = Writer(tmp_path / "new" / "run", 0, 1)
    writer.save(at(13), tensors, {"rate": 0.1 + 0.2, "nan": float("nan")})
    tensors["model/turned"].zero_()
    writer.close(failed=False)
    path, skipped = newest(tmp_path / "new" / "run")
    stored = Stored(path)
    assert (path.name, skipped) == ("step-00000013", [])
    assert (stored.facts.epoch, stored.facts.step, len(stored.facts.rows)) == (1, 3, 1)
    assert stored.numbers[0]["rate"] == 0.1 + 0.2
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
    assert not list(tmp_path.glob("*.part"))


def damaged(path, **changes):
    facts = json.loads((path / "facts.json").read_text()) | changes
    facts = {name: value for name, value in facts.items() if value is not ...}
    (path / "facts.json").write_text(json.dumps(facts))


DAMAGE = {
    "no facts.json": lambda path: (path / "facts.json").unlink(),
    "it is not JSON": lambda path: (path / "facts.json").write_text('{"epoch": 1'),
    "its format is 1, and this version of labkit reads 2": lambda path: damaged(path, format=1),
    "its format is None": lambda path: (path / "facts.json").write_text("[]"),
    "no valid epoch": lambda path: damaged(path, epoch=...),
    "no valid epoch and step": lambda path: damaged(path, epoch=-1),
    "no valid step of its name": lambda path: damaged(path, step=4),
    "no valid rows": lambda path: damaged(path, rows=[{"loss": "low"}] * 2),
    "no valid files": lambda path: damaged(path, files={"../rank0.safetensors": 3}),
    "cannot be read: Too many": lambda path: (
        (path / "facts.json").rename(path / "x"),
        (path / "facts.json").symlink_to("x"),
    ),
    "facts.json is not a file": lambda path: (
        (path / "facts.json").unlink(),
        os.mkfifo(path / "facts.json"),
    ),
    "rank0.safetensors is not a file": lambda path: (
        (path / "rank0.safetensors").rename(path / "x"),
        (path / "rank0.safetensors").symlink_to("x"),
    ),
    r"has \d+ bytes, and \d+ were written": lambda path: os.truncate(
        path / "rank0.safetensors", 99
    ),
    "rank0.safetensors cannot be read: No such": lambda path: (
        path / "rank0.safetensors"
    ).unlink(),
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
    file = tmp_path / "step-00000010" / "rank0.safetensors"
    file.write_bytes(b"\xff" * file.stat().st_size)
    with pytest.raises(ValueError, match=r"step-00000010 is damaged"):
        Stored(tmp_path / "step-00000010")
    # Of another program: without the numbers of a rank.
    save_file({"model/a": torch.ones(1)}, file)
    with pytest.raises(ValueError, match=r"step-00000010 is damaged"):
        Stored(tmp_path / "step-00000010")


def test_one_is_whole_when_all_ranks_have_written(tmp_path):
    first, second = Writer(tmp_path, 0, 2), Writer(tmp_path, 1, 2)
    first.save(at(10), {"model/a": torch.ones(2)}, {})
    time.sleep(0.1)
    assert steps(tmp_path) == []
    second.save(at(10), {"own/b": torch.zeros(2)}, {})
    second.close(failed=False)
    first.wait()
    assert Stored(newest(tmp_path).path).of_all("own").keys() == {"b"}
    # A run that has failed gives it up, and it is removed when its ranks have ended.
    first.save(at(20), {"model/a": torch.ones(2)}, {})
    remove_unfinished(str(tmp_path))
    first.close(failed=True)
    first._thread.join(5)
    assert list(tmp_path.glob("*.part")), "another run has the folder"
    remove_unfinished(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010"]


def test_two_runs_do_not_write_into_one_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("labkit.training.checkpoint._PATIENCE_S", 0)
    first = Writer(tmp_path, 0, 1)
    with pytest.raises(OutputError, match="another run is writing there"):
        Writer(tmp_path, 0, 1)
    first.close(failed=False)
    write(tmp_path, 10)


def test_a_full_disk_leaves_the_older_checkpoint(tmp_path):
    write(tmp_path, 10)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writer = Writer(tmp_path, 0, 1)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        writer.save(at(20), {"model/a": torch.ones(1000)}, {})
        with pytest.raises(OutputError, match=f"cannot write a checkpoint to {tmp_path}"):
            writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    writer.close(failed=True)
    remove_unfinished(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010"]
    assert why_not_whole(tmp_path / "step-00000010") == ""


def test_a_damaged_one_of_the_same_name_is_kept_aside(tmp_path):
    write(tmp_path, 10, 20)
    DAMAGE["no facts.json"](tmp_path / "step-00000020")
    write(tmp_path, 20)
    assert read_facts(tmp_path / "step-00000020").epoch == 2
    assert len(list(tmp_path.glob("step-00000020.old-*"))) == 1
