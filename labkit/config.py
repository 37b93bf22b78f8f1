"""RunConfig: everything that decides a training run, in one frozen, self-checking place."""

from dataclasses import asdict, dataclass
from typing import Any

DTYPES = ("float32", "float64")
BACKENDS = ("auto", "gloo", "nccl", "labkit")


@dataclass(frozen=True)
class RunConfig:
    """The settings of one training run.

    Attributes:
        strategy: the technique, by its ``--strategy`` name.
        world_size: number of ranks.
        batch_size: the global batch, over all ranks together, so that runs with other world sizes
            do the same arithmetic.
        epochs: passes over the training samples.
        model, dataset: names, see ``labkit.workload``.
        device: ``auto``, ``cpu`` or ``cuda``.
        seed: of the parameters and of the order of the samples.
        lr, momentum: of plain SGD.
        dtype: ``float32``, or ``float64`` for the equivalence tests.
        builtin: run PyTorch's counterpart of the technique.
        backend: the process group below PyTorch's counterpart; ``labkit`` is this package's own
            collectives, ``auto`` what suits the device.
        transport: how the messages of our implementations travel, see ``labkit.run``.
        train_size: use the first so many training samples; None uses all.
    """

    strategy: str = "single"
    world_size: int = 1
    batch_size: int = 64
    epochs: int = 1
    model: str = "small_cnn"
    dataset: str = "digits"
    device: str = "auto"
    seed: int = 0
    lr: float = 0.05
    momentum: float = 0.9
    dtype: str = "float32"
    builtin: bool = False
    backend: str = "auto"
    transport: str = "auto"
    train_size: int | None = None

    def __post_init__(self):
        for name in ("world_size", "batch_size", "epochs", "train_size"):
            _check_whole(name, getattr(self, name), optional=name == "train_size")
        if self.batch_size < self.world_size:
            raise ValueError(
                f"batch_size {self.batch_size} is smaller than world_size {self.world_size}: some "
                f"ranks would never get a sample. Use a batch of at least {self.world_size}"
            )
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, got {self.lr!r}")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum must be from 0 to below 1, got {self.momentum!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"unknown dtype {self.dtype!r}: choose one of {', '.join(DTYPES)}")
        if self.backend not in BACKENDS:
            known = ", ".join(BACKENDS)
            raise ValueError(f"unknown backend {self.backend!r}: choose one of {known}")
        if self.backend != "auto" and not self.builtin:
            raise ValueError(
                f"backend {self.backend!r} is for PyTorch's counterpart: choose builtin as well, "
                "or transport for our own implementation"
            )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _check_whole(name: str, value: Any, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number from 1, got {value!r}")
