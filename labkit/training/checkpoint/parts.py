"""The files of a checkpoint: each rank's tensors, ``.metadata`` over all of them, the facts."""

import dataclasses
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from labkit.training.checkpoint.folder import FACTS, sync
from labkit.training.checkpoint.plan import Copies, Plan
from labkit.training.checkpoint.stream import HashedFile, HashedFiles, Pace
from labkit.training.checkpoint.whole import dumped


class Part(FileSystemWriter):
    """PyTorch's writer, through files that are hashed and written at a pace."""

    def __init__(self, path: Path, pace: Pace):
        # Copied ahead are only tensors on a GPU, and these are in host memory already.
        super().__init__(path, per_thread_copy_ahead=0)
        self.hashed = HashedFiles(pace)
        self.fs: FileSystem = self.hashed

    def storage_meta(self) -> StorageMeta:
        # Without the path, which is that of the hidden folder.
        return StorageMeta(save_id=self.save_id)


def write_part(path: Path, plan: Plan, copies: Copies, pace: Pace) -> dict[str, Any]:
    """Write this rank's tensors, and return what ``add_facts`` has to know of them.

    Returns:
        ``files``, see ``HashedFiles``, and ``stored``: for each tensor its name, its offset in
        the whole tensor, and its file with its first byte and their number there.

    Raises:
        OSError: they cannot be written.
    """
    if not plan.mine.items:
        return {"files": {}, "stored": []}
    part = Part(path, pace)
    try:
        results = part.write_data(plan.mine, copies).wait()
    except RuntimeError:
        # PyTorch's own error says only that its file could not be written.
        if part.hashed.error is not None:
            raise part.hashed.error from None
        raise
    return {"files": part.hashed.files, "stored": list(map(_as_row, results))}


def _as_row(result: WriteResult) -> list[Any]:
    at = result.storage_data
    offset = None if result.index.offset is None else list(result.index.offset)
    return [result.index.fqn, offset, at.relative_path, at.offset, at.length]


def _from_row(row: list[Any]) -> WriteResult:
    name, offset, *at = row
    return WriteResult(MetadataIndex(name, offset), at[2], _StorageInfo(*at))


def add_facts(
    path: Path,
    step: int,
    facts: dict[str, Any],
    metadata: Metadata,
    parts: list[dict[str, Any]],
    pace: Pace,
) -> None:
    """Complete a checkpoint whose tensors are written: add ``.metadata``, then ``labkit.json``.

    Args:
        path: the hidden folder.
        step, facts: see ``CheckpointWriter.save``.
        metadata: of all tensors, see ``Plan``.
        parts: what ``write_part`` returned, by rank.
        pace: of the writing.

    Raises:
        OSError: they cannot be written.
    """
    whole = Part(path, pace)
    results = [[_from_row(row) for row in part["stored"]] for part in parts]
    whole.finish(dataclasses.replace(metadata), results)
    files = {name: told for part in parts for name, told in part["files"].items()}
    with HashedFile(path / FACTS, pace) as file:
        file.write(dumped(step, facts, files | whole.hashed.files))
        file.sync()
    sync(path)
