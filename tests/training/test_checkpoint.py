"""A checkpoint is written whole or not at all, and what is not whole is skipped and named."""

import json
import os
import re
import shutil
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from test_files import at_most

from labkit.engine.errors import OutputError
from labkit.training.checkpoint_files import (
    Facts,
    newest,
    read,
    remove_unfinished,
    save,
    step_path,
    steps,
)

ROW = {"loss": 0.5, "seconds": 0.1, "test_accuracy": float("nan")}
ALONE = SimpleNamespace(rank=0, world_size=1, barrier=lambda: None)
EACH = {"random/cpu": torch.get_rng_state(), "progress/sums": torch.zeros(5)}
EACH |= {"progress/draws": torch.tensor(False), "progress/updates": torch.tensor(3)}
EACH |= {"random/python": torch.zeros(626), "random/numpy": torch.zeros(627)}
EACH |= {"kept/numbers": torch.tensor(list(b"{}"), dtype=torch.uint8)}
PART = "rank0.safetensors"


def facts_at(step):
    """The facts after so many steps, ten in an epoch."""
    epoch, rest = divmod(step, 10)
    return Facts(epoch, rest, [ROW] * epoch, {})


def tensors_of(step):
    large = torch.full((4, 6), float(step))
    kinds = [torch.float64, torch.bfloat16, torch.int64, torch.bool]
    named = {"model/turned": large.t(), "model/part": large[1:2], "model/tied": large}
    named |= {"model/scalar": torch.tensor(2.5), "model/empty": torch.empty(0, 3)}
    return EACH | named | {f"own/{kind}": torch.arange(6).to(kind) for kind in kinds}


def write(folder, *at_steps):
    for step in at_steps:
        save(ALONE, step_path(folder, step), facts_at(step), tensors_of(step))


def test_what_was_saved_is_read(tmp_path):
    write(tmp_path / "new" / "run", 13)
    stored, skipped = newest(tmp_path / "new" / "run")
    assert (stored.path.name, skipped) == ("step-00000013", [])
    assert (stored.facts.epoch, stored.facts.step, len(stored.facts.rows)) == (1, 3, 1)
    found = stored.of("model") | stored.of("own", 0)
    for name, tensor in (tensors_of(13).items()) - EACH.items():
        assert torch.equal(found[name.partition("/")[2]], tensor), name
        assert found[name.partition("/")[2]].dtype == tensor.dtype


def test_the_newest_two_stay_and_no_link_is_followed(tmp_path):
    write(tmp_path, 10, 20, 30)
    assert [step for step, _ in steps(tmp_path)] == [30, 20]
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "step-00000030", other)
    for name in (".step-00000005.part", "step-00000001"):
        (tmp_path / name).symlink_to(other)
    shutil.copytree(other, tmp_path / ".step-00000006.part")
    write(tmp_path, 40)
    remove_unfinished(str(tmp_path))
    assert (other / PART).exists()
    assert not (tmp_path / ".step-00000006.part").exists()


def facts(**changes):
    def damage(path):
        found = json.loads((path / "facts.json").read_text()) | changes
        (path / "facts.json").write_text(json.dumps(found))

    return damage


def instead(name, put):
    def damage(path):
        (path / name).rename(path / "x")
        put(path / name)

    return damage


def link(path):
    path.symlink_to("x")


def garbled(path):
    path.write_bytes(b"\xff" * path.with_name("x").stat().st_size)


def of_another_program(path):
    save_file({"model/a": torch.ones(1)}, path / PART)
    facts(files={PART: (path / PART).stat().st_size})(path)


DAMAGE = {
    "JSONDecodeError": lambda path: (path / "facts.json").write_text('{"epoch": 1'),
    "its format is 1, and this version of labkit reads 7": facts(format=1),
    "does not describe": facts(rows=[{"loss": "low"}] * 2),
    f"KeyError: '{PART}'": facts(files={"../rank0.safetensors": 3}),
    "Too many levels": instead("facts.json", link),
    "facts.json|Illegal seek|not seekable|Expecting value": instead("facts.json", os.mkfifo),
    f"{PART} has .* bytes, .* were written to a file": instead(PART, link),
    r"has 99 bytes, \d+ were written": lambda path: os.truncate(path / PART, 99),
    "SafetensorError": instead(PART, garbled),
    "a rank's file lacks its progress": of_another_program,
    "it is a link": lambda path: (
        path.rename(path.with_name("x")),
        path.symlink_to(path.with_name("x")),
    ),
}


@pytest.mark.parametrize("why", DAMAGE)
def test_a_damaged_or_forged_checkpoint_is_named_and_the_one_before_it_taken(tmp_path, why):
    write(tmp_path, 10, 20)
    DAMAGE[why](tmp_path / "step-00000020")
    stored, (said,) = newest(tmp_path)
    assert stored.path.name == "step-00000010"
    assert said.startswith("step-00000020: ")
    assert re.search(why, said), said


def test_one_is_whole_when_all_ranks_have_written(tmp_path):
    meet = threading.Barrier(2)

    def meet_and_pause():
        """What rank 1 writes after a barrier, it writes late."""
        meet.wait()
        time.sleep(0.2)

    first = SimpleNamespace(rank=0, world_size=2, barrier=meet.wait)
    second = SimpleNamespace(rank=1, world_size=2, barrier=meet_and_pause)
    one = step_path(tmp_path, 10), facts_at(10)
    own = EACH | {"own/b": torch.zeros(2)}
    other = threading.Thread(target=save, args=(second, *one, own))
    other.start()
    save(first, *one, EACH | {"model/a": torch.ones(2)})
    other.join()
    assert newest(tmp_path)[0].of("own").keys() == {"b"}
    # A rank that is lost leaves nothing that counts.
    threading.Timer(0.2, meet.abort).start()
    with pytest.raises(threading.BrokenBarrierError):
        save(first, step_path(tmp_path, 20), facts_at(20), EACH)
    assert newest(tmp_path)[0].path == tmp_path / "step-00000010"
    remove_unfinished(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_a_full_disk_leaves_the_older_checkpoint(tmp_path):  # row 28
    write(tmp_path, 10)
    says = f"cannot write a checkpoint to {tmp_path}"
    with at_most(1000), pytest.raises(OutputError, match=says):
        save(ALONE, step_path(tmp_path, 20), facts_at(20), {"model/a": torch.ones(1000)})
    remove_unfinished(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    read(tmp_path / "step-00000010")
