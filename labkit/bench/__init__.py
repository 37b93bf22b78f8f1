"""``labkit bench``: speeds measured on this machine, in pairs, as ratios with their spread.

    launch        labkit.run against torch.multiprocessing.spawn
    all-reduce    our algorithms against gloo and NCCL; the cost model fitted and compared
    ddp           a step of our DDP, and of PyTorch's on the backend "labkit" and on others
    placement     the cuts of VGG16: hops by placement, and every single cut against the planner
    pipeline      a step of our pipelines, of PyTorch's, and of a split without a pipeline
    checkpoint    a step with and without a checkpoint being written in the background
    two-hosts     one worker, two on one host, four on two hosts, over cables of several rates

``turns`` has the rules of timing, ``record`` what is recorded beside the results, ``compare`` the
command ``labkit compare``. ``python tools/bench_mpi.py`` is the all-reduce bench with MPI as an
additional contender.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.bench.command import BENCHES, main

__all__ = ["BENCHES", "main"]


def __getattr__(name: str) -> Any:
    """The command, and with it all benches, when they are asked for: one bench needs no other."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from labkit.bench import command

    return getattr(command, name)
