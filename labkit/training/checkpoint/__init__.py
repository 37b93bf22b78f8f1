"""Checkpoint files: written in the background, whole or not at all, and found and read again.

folder    the names in a checkpoint folder, its lock, and what may be removed from it
whole     ``labkit.json``, and whether a checkpoint is whole; ``newest`` and ``read_facts``
reading   ``read_tensors``, without a process group, and without running code from the file
plan      which rank writes which tensor, agreed by all ranks
space     whether it fits on the disk, and what is said if not
stream    a file that is hashed while it is written, at a pace that leaves the cores to training
writing   ``CheckpointWriter``

A folder of checkpoints holds::

    step-00000120/          one checkpoint, in the format of torch.distributed.checkpoint
        .metadata           what is where; a pickle, see ``reading``
        __0_0.distcp        the tensors that rank 0 has written; __1_0.distcp those of rank 1
        labkit.json         plain facts, and the size and SHA-256 of the other files
    best -> step-00000120   the checkpoint that was saved with ``best=True`` last
    .labkit-lock            locked by the run that writes here
    .labkit-3f..9c.part/    a checkpoint that is being written
"""

from labkit.training.checkpoint.folder import check_folder, remove_unfinished, steps
from labkit.training.checkpoint.whole import Found, newest, read_facts, why_not_whole

__all__ = [
    "Found",
    "check_folder",
    "newest",
    "read_facts",
    "remove_unfinished",
    "steps",
    "why_not_whole",
]
