"""A launcher's settings in the environment of a rank: its number, and the ranks' address.

torchrun, Kubernetes' operators and scripts set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. The
variables of ``mpirun`` and ``srun`` do not say where the ranks meet. Settings in part are refused:
each of N ranks would train by itself, as if it were alone.
"""

import os
from dataclasses import dataclass

from labkit.units import format_count

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_LOCAL = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Only a launcher sets them. (Programs also set MASTER_ADDR and MASTER_PORT, for themselves.)
_LAUNCHERS_OWN = ("RANK", "WORLD_SIZE", *_LOCAL)
# Other launchers' variables: the rank, and the number of ranks. (A single process may run in a
# batch script or in salloc, which have SLURM_PROCID and SLURM_NTASKS, too.)
_OTHERS = {
    "Open MPI's mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    "MVAPICH's mpirun": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    "mpirun": ("PMI_RANK", "PMI_SIZE"),
}
# In a rank: the id of its process; RUN in those that labkit has started. Its children inherit it.
MARK = "LABKIT_RANK"
RUN = "run"
# The name of a rank's process that labkit has started, before its number.
RANK_NAME = "labkit-rank-"
# The exit code of a rank that imports a script which starts ranks whenever it is imported.
UNGUARDED = 78
GUARD = 'under if __name__ == "__main__":'
INSIDE = (
    "labkit.run was called inside a rank of another run, or in a process that one has started: "
    "start runs from a notebook or a script. A program of its own is to be started without the "
    f"rank's variables {', '.join(_LAUNCHERS_OWN)}"
)


@dataclass(frozen=True)
class Numbers:
    """A rank's numbers among all ranks and those of its host; None where a launcher says none."""

    rank: int | None
    world_size: int | None
    local_rank: int | None
    local_world_size: int | None
    host: int | None

    @property
    def num_hosts(self) -> int | None:
        """Hosts that have ranks, 1 without a launcher; None if only the ranks can find out."""
        if os.environ.get("GROUP_WORLD_SIZE"):
            return _integer("GROUP_WORLD_SIZE")
        if self.world_size is None or self.world_size == self.local_world_size:
            return 1
        return None


@dataclass(frozen=True)
class Started(Numbers):
    """The numbers of a rank that a launcher has started, beside others."""

    rank: int
    world_size: int
    address: str  # HOST:PORT, where the ranks meet
    launcher: str  # as errors name it
    is_server: bool  # whether this rank listens there, and not its launcher


def read_numbers() -> Numbers:
    """The numbers of this process; ValueError if they are no integers, or contradict."""
    for name, size_name in (("RANK", "WORLD_SIZE"), _LOCAL):
        number = _integer(name)
        size = _integer(size_name)
        if number is not None and size is not None and not 0 <= number < size:
            limits = f"{name} goes from 0 to {size_name} - 1"
            raise ValueError(f"{name}={number} and {size_name}={size}: {limits}")
    return Numbers(*map(_integer, ("RANK", "WORLD_SIZE", *_LOCAL, "GROUP_RANK")))


def started_as_rank() -> Started | None:
    """The numbers of this process if a launcher has started it as one of several ranks, or None.

    Raises:
        ValueError: the launcher has said only a part, or says it in variables of its own.
    """
    given = [name for name in _NEEDED + _LOCAL if os.environ.get(name)]
    if "RANK" in given and os.environ.get(MARK, str(os.getpid())) != str(os.getpid()):
        raise ValueError(INSIDE)
    if not set(given).intersection(_LAUNCHERS_OWN):
        _check_no_other()
        return None
    missing = [name for name in _NEEDED if name not in given]
    if missing:
        values = ", ".join(f"{name}={os.environ[name]}" for name in given)
        launchers_own = ", ".join(name for name in given if name in _LAUNCHERS_OWN)
        raise ValueError(
            f"{values} in the environment, but not {', '.join(missing)}: one of several ranks "
            f"needs {', '.join(_NEEDED)} (torchrun sets them); for a run that starts its ranks "
            f"itself, unset {launchers_own}"
        )
    numbers = read_numbers()
    _integer("MASTER_PORT")
    is_torchruns = "TORCHELASTIC_RUN_ID" in os.environ
    if numbers.world_size == 1 and not is_torchruns:
        _check_no_other()
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Started(
        **vars(numbers),
        address=f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
        launcher="torchrun" if is_torchruns else "the launcher of this process",
        is_server=numbers.rank == 0 and not has_agent,
    )


def is_rank_0() -> bool:
    """True if this process speaks for its run: it is the first rank, or the only process."""
    return os.environ.get("RANK", "0") == "0"


def fill_in(rank: int, hosts: list[str]) -> None:
    """Set what the launcher has not said, from the names of all ranks' hosts, by rank."""
    names = list(dict.fromkeys(hosts))
    neighbors = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    os.environ.setdefault("LOCAL_RANK", str(neighbors.index(rank)))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(len(neighbors)))
    os.environ.setdefault("GROUP_RANK", str(names.index(hosts[rank])))
    read_numbers()


def _integer(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}={text} in the environment is not an integer") from None


def _check_no_other() -> None:
    """ValueError if another launcher has started this process as one of several."""
    for launcher, (rank, size) in _OTHERS.items():
        count = _integer(size) if rank in os.environ else None
        if count is not None and count > 1:
            raise ValueError(
                f"{launcher} has started {format_count(count, 'process')} ({size}={count}), which "
                "do not know where to meet: start torchrun with it, one per machine, or set in "
                f"each process RANK=${rank}, WORLD_SIZE=${size}, MASTER_ADDR (the machine of rank "
                "0) and MASTER_PORT (a free port there); see docs/command_line.md"
            )
