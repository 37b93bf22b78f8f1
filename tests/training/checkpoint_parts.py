"""What the tests of checkpoints share: a writer without ranks, odd tensors, trees of files."""

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import torch
from labkit.training.checkpoint.writing import CheckpointWriter

# All that the writer of one rank asks of its Comm.
ALONE = SimpleNamespace(rank=0, world_size=1)


def tensors_of(step, size=40):
    """Nested tensors that depend on the step, so that two checkpoints are never mixed up."""
    generator = torch.Generator().manual_seed(step)
    flat = torch.randn(size * 10, generator=generator)
    return {
        "model": {"fc.weight": flat[:size].view(-1, 4), "fc.bias": flat[size : size + 1]},
        "optimizer": {"state": {"fc.weight": {"step": torch.tensor(step), "momentum": flat[:9]}}},
        "ranks": {"0": {"random": torch.arange(step, step + 8, dtype=torch.uint8)}},
    }


def write(folder, *steps, keep=9, best=(), size=40):
    """Write these checkpoints one after another; returns their paths."""
    with CheckpointWriter(ALONE, folder, keep) as writer:
        for step in steps:
            writer.save(step, tensors_of(step, size), {"step": step}, best=step in best)
    return [Path(folder, f"step-{step:08d}") for step in steps]


def flat(tree, above=()):
    """The leaves of nested dicts, by path."""
    found = {}
    for key, value in tree.items():
        below = flat(value, (*above, key)) if isinstance(value, dict) else {(*above, key): value}
        found |= below
    return found


def assert_equal_trees(tree, other):
    tree, other = flat(tree), flat(other)
    assert tree.keys() == other.keys()
    for path, tensor in tree.items():
        found = other[path]
        assert (tensor.dtype, tensor.shape) == (found.dtype, found.shape), path
        assert torch.equal(tensor.contiguous().view(-1), found.contiguous().view(-1)), path


def everything_in(folder):
    """Names, kinds, contents, modes and times of all that is in a folder."""
    found = {}
    for path in sorted(Path(folder).rglob("*")):
        seen = path.lstat()
        kind = stat.S_IFMT(seen.st_mode)
        content = os.readlink(path) if path.is_symlink() else None
        if stat.S_ISREG(seen.st_mode):
            content = path.read_bytes()
        found[str(path)] = kind, seen.st_mode, seen.st_mtime_ns, content
    return found


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())
