"""The newest whole checkpoint is found, what is damaged is said and left; hostile files run
nothing."""

import contextlib
import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_parts import assert_equal_trees, everything_in, tensors_of, write
from labkit.training.checkpoint.reading import read_tensors
from labkit.training.checkpoint.whole import dumped, file_digest, read_record
from torch.distributed.checkpoint.metadata import Metadata

from labkit.training.checkpoint import newest, read_facts, why_not_whole

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def cut(path, num_bytes):
    path.write_bytes(path.read_bytes()[:num_bytes])


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def without_its_facts(path):
    os.unlink(path / "labkit.json")


def of_another_format(path):
    record = json.loads((path / "labkit.json").read_text())
    (path / "labkit.json").write_text(json.dumps(record | {"labkit_checkpoint": 2}))


def as_a_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def as_a_file(path):
    shutil.rmtree(path)
    path.touch()


def empty(path):
    shutil.rmtree(path)
    path.mkdir()


def with_a_folder_for_a_file(path):
    os.unlink(path / "__0_0.distcp")
    (path / "__0_0.distcp").mkdir()


def with_a_link_for_a_file(path):
    (path / "__0_0.distcp").rename(path.parent / "moved")
    (path / "__0_0.distcp").symlink_to("../moved")


DAMAGES = [
    (lambda path: cut(path / "__0_0.distcp", 100), r"__0_0\.distcp has 100 bytes, and \d+ were"),
    (lambda path: cut(path / ".metadata", 0), r"\.metadata has 0 bytes, and \d+ were written"),
    (lambda path: flip(path / "__0_0.distcp", 700), r"__0_0\.distcp has been changed .*SHA-256"),
    (lambda path: flip(path / ".metadata"), r"\.metadata has been changed or damaged.*SHA-256"),
    (lambda path: os.unlink(path / "__0_0.distcp"), r"files are missing: __0_0\.distcp$"),
    (lambda path: os.unlink(path / ".metadata"), r"files are missing: \.metadata$"),
    (without_its_facts, r"no labkit\.json: it is incomplete, or was not written by labkit"),
    (of_another_format, r"it has format 2, and this version of labkit reads format 1"),
    (lambda path: cut(path / "labkit.json", 0), r"labkit\.json is empty"),
    (lambda path: cut(path / "labkit.json", 90), r"labkit\.json is damaged: it is not JSON"),
    (lambda path: flip(path / "labkit.json", 45), r"labkit\.json is damaged"),
    (lambda path: (path / "labkit.json").write_text("[1]"), r"was not written by labkit"),
    (lambda path: (path / "labkit.json").write_bytes(b"\xff\x00"), r"labkit\.json is damaged"),
    (as_a_link, r"it is a link"),
    (as_a_file, r"it is not a folder"),
    (empty, r"no labkit\.json"),
    (with_a_folder_for_a_file, r"__0_0\.distcp is not a file"),
    (with_a_link_for_a_file, r"__0_0\.distcp is not a file"),
]


def test_every_damage_is_said_and_left_and_the_one_before_is_found(tmp_path):
    older, _ = write(tmp_path / "sound", 120, 140)
    for number, (damage, said) in enumerate(DAMAGES):
        folder = tmp_path / str(number)
        shutil.copytree(tmp_path / "sound", folder, symlinks=True)
        damage(folder / "step-00000140")
        before = everything_in(folder)
        found = newest(folder)
        assert found.path == folder / older.name, said
        assert len(found.skipped) == 1
        assert re.search(f"^step-00000140: .*{said}", found.skipped[0])
        assert everything_in(folder) == before, said
    assert newest(tmp_path / "sound") == (tmp_path / "sound" / "step-00000140", [])


def test_all_that_are_damaged_are_named_newest_first(tmp_path):
    for path in write(tmp_path, 1, 2, 3):
        os.unlink(path / "__0_0.distcp")
    found = newest(tmp_path)
    assert found.path is None
    assert [line[:13] for line in found.skipped] == [f"step-0000000{k}" for k in (3, 2, 1)]


def test_only_folders_of_steps_count(tmp_path):
    (path,) = write(tmp_path, 5)
    for name in ("step-6", "step-0000000x", "step-00000007.old", ".labkit-" + "0" * 16 + ".part"):
        shutil.copytree(path, tmp_path / name)
    assert newest(tmp_path) == (path, [])
    assert newest(tmp_path / "nowhere") == (None, [])
    shutil.copytree(path, tmp_path / "step-123456789")
    assert newest(tmp_path).path.name == "step-123456789"
    with pytest.raises(ValueError, match=r"cannot read checkpoints in .*labkit\.json: Not a dir"):
        newest(path / "labkit.json")


@as_root
def test_a_checkpoint_that_another_user_has_put_there_is_not_taken(tmp_path):
    older, newer = write(tmp_path, 1, 2)
    os.chown(newer, 65534, 65534)
    found = newest(tmp_path)
    assert found.path == older
    assert "belongs to user 65534" in found.skipped[0]
    # A whole folder of somebody else's is what the user has named.
    os.chown(tmp_path, 65534, 65534)
    assert newest(tmp_path).path == newer


def test_facts_come_back_and_are_refused_if_damaged(tmp_path):
    (path,) = write(tmp_path, 7)
    assert read_facts(path) == {"step": 7}
    (path / "labkit.json").write_bytes((path / "labkit.json").read_bytes().replace(b"7", b"8"))
    with pytest.raises(ValueError, match=r"cannot read .*step-00000007: labkit\.json is damaged"):
        read_facts(path)


# Tensors


def test_any_tensors_are_read_by_name_or_by_what_is_above_them(tmp_path):
    (path,) = write(tmp_path, 3, best=[3])
    whole = tensors_of(3)
    assert_equal_trees(read_tensors(path), whole)
    assert_equal_trees(read_tensors(tmp_path / "best"), whole)
    assert_equal_trees(read_tensors(str(path), ["model"]), {"model": whole["model"]})
    chosen = read_tensors(path, ["model.fc.bias", "optimizer.state", "optimizer"])
    bias = {"fc.bias": whole["model"]["fc.bias"]}
    assert_equal_trees(chosen, {"model": bias, "optimizer": whole["optimizer"]})
    assert read_tensors(path, []) == {}
    for key in ("model.fc", "mod", "model.fc.weight.x", ""):
        with pytest.raises(ValueError, match=rf"has no '{key}'; it has model, optimizer, ranks"):
            read_tensors(path, ["model", key])


def test_what_is_read_has_memory_of_its_own(tmp_path):
    (path,) = write(tmp_path, 3)
    weight = read_tensors(path)["model"]["fc.weight"]
    assert weight.untyped_storage().nbytes() == weight.nbytes
    weight.zero_()
    assert_equal_trees(read_tensors(path), tensors_of(3))


def test_a_damaged_checkpoint_is_not_read(tmp_path):
    (path,) = write(tmp_path, 3)
    cut(path / "__0_0.distcp", 200)
    with pytest.raises(ValueError, match=r"cannot read the checkpoint .*has 200 bytes, and"):
        read_tensors(path)
    with pytest.raises(ValueError, match=r"cannot read the checkpoint .*nowhere: no labkit"):
        read_tensors(tmp_path / "nowhere")


def test_flipped_bits_of_a_tensor_never_crash_the_reader(tmp_path):
    """As if nobody had compared the SHA-256: an error of ours, or other values."""
    (path,) = write(tmp_path, 3)
    sound = (path / "__0_0.distcp").read_bytes()
    for at in range(0, len(sound), 97):
        flip(path / "__0_0.distcp", at)
        # Any other error is a crash.
        with contextlib.suppress(ValueError):
            read_tensors(path)
        (path / "__0_0.distcp").write_bytes(sound)


# Hostile files


class Hostile:
    def __init__(self, call, *values):
        self.call = call, values

    def __reduce__(self):
        return self.call


def put_in(path, metadata):
    """Put another ``.metadata`` into a checkpoint, and let ``labkit.json`` name it."""
    record = read_record(path)
    (path / ".metadata").write_bytes(metadata)
    told = {"bytes": len(metadata), "sha256": file_digest(path / ".metadata")}
    files = record["files"] | {".metadata": told}
    (path / "labkit.json").write_bytes(dumped(record["step"], record["facts"], files))
    assert why_not_whole(path) == ""


def test_a_hostile_description_runs_nothing(tmp_path):
    (path,) = write(tmp_path, 3)
    sign = tmp_path / "ran"
    calls = [
        Hostile(os.mkdir, str(sign)),
        Hostile(os.system, f"touch {sign}"),
        Hostile(eval, f"__import__('pathlib').Path({str(sign)!r}).touch()"),
        Hostile(torch.load, str(path / "__0_0.distcp")),
        Hostile(getattr, torch.Size, "__class__"),
        Hostile(Path, str(sign)),
    ]
    for hostile in calls:
        put_in(path, pickle.dumps(hostile))
        with pytest.raises(ValueError, match=r"\.metadata is damaged or foreign: it names \w+"):
            read_tensors(path)
    # Attributes of the describing classes themselves: they are new for each file.
    # GLOBAL Metadata, (None, {"version": 1}), BUILD.
    named = b"ctorch.distributed.checkpoint.metadata\nMetadata\n(N}Vversion\nI1\nstb."
    put_in(path, named)
    with pytest.raises(ValueError, match=r"\.metadata is damaged or foreign"):
        read_tensors(path)
    assert Metadata.version is None
    assert not sign.exists()


def described(path):
    with open(path / ".metadata", "rb") as file:
        return pickle.load(file)


def test_a_description_leads_to_no_other_file_and_no_more_bytes(tmp_path):
    (path,) = write(tmp_path, 3)
    (tmp_path / "secret").write_bytes(b"x" * 100_000)
    sound = described(path)
    key = next(index for index in sound.storage_data if index.fqn == "model.fc.weight")

    def refused(said, **changes):
        changed = described(path)
        place = next(v for k, v in changed.storage_data.items() if k == key)
        for name, value in changes.items():
            where = place if hasattr(place, name) else changed.state_dict_metadata[key.fqn]
            setattr(where, name, value)
        put_in(path, pickle.dumps(changed))
        with pytest.raises(ValueError, match=said):
            read_tensors(path)
        put_in(path, pickle.dumps(sound))

    for file in ("../secret", str(tmp_path / "secret"), "", "..", "nothing"):
        refused("outside of the checkpoint's files", relative_path=file)
    for offset in (-1, 10**9):
        refused("outside of the checkpoint's files", offset=offset)
    refused("outside of the checkpoint's files", length=10**9)
    refused("more elements than are stored", size=torch.Size([10**12]))
    refused("holds something else than", size=torch.Size([4, 1]))
    refused("is divided or encoded", chunks=[])
    refused("is divided or encoded", transform_descriptors=["stream.zstd"])
    assert_equal_trees(read_tensors(path), tensors_of(3))


def test_a_tensor_that_is_hostile_code_runs_nothing(tmp_path):
    (path,) = write(tmp_path, 3)
    sign = tmp_path / "ran"
    torch.save({"x": Hostile(os.mkdir, str(sign))}, tmp_path / "hostile")
    hostile = (tmp_path / "hostile").read_bytes()
    changed = described(path)
    start = (path / "__0_0.distcp").stat().st_size
    with open(path / "__0_0.distcp", "ab") as file:
        file.write(hostile)
    for place in changed.storage_data.values():
        place.offset, place.length = start, len(hostile)
    record = read_record(path)
    size = start + len(hostile)
    told = {"bytes": size, "sha256": file_digest(path / "__0_0.distcp")}
    files = record["files"] | {"__0_0.distcp": told}
    (path / "labkit.json").write_bytes(dumped(3, {}, files))
    put_in(path, pickle.dumps(changed))
    with pytest.raises(ValueError, match="is damaged, at"):
        read_tensors(path)
    assert not sign.exists()
