"""The contenders of a comparison, and the settings in which all of them run.

Contenders are the techniques that split the batch over the ranks, and PyTorch's counterparts.
There is one main setting; each of the others differs from it in one value.
"""

import statistics
from dataclasses import dataclass

from labkit import devices, strategies
from labkit.config import STAGED, RunConfig
from labkit.strategies.async_parameter_server import AsyncParameterServer
from labkit.units import format_count

SINGLE = "single"
# The first epoch is warm-up, and two more give an epoch's time.
_EPOCHS_FOR_TIME = 3


@dataclass(frozen=True)
class Contender:
    """One technique in one implementation.

    Attributes:
        name: for ours, the strategy's; for PyTorch's, its class, and the backend if it has two.
        strategy, builtin, backend: as in ``RunConfig``.
        counterpart: for ours, the name of PyTorch's counterpart, if it has one.
        own_pace: its ranks do not wait for each other, so its parameters may differ from those
            of one device.
    """

    name: str
    strategy: str
    builtin: bool = False
    backend: str = "auto"
    counterpart: str | None = None
    own_pace: bool = False

    def config(self, world_size: int, **settings) -> RunConfig:
        """The configuration of a run of this contender; ``single`` always has one rank."""
        return RunConfig(
            strategy=self.strategy,
            builtin=self.builtin,
            backend=self.backend,
            world_size=1 if self.strategy == SINGLE else world_size,
            **settings,
        )


def find_contenders(names: tuple[str, ...] = (), device: str = "auto") -> list[Contender]:
    """The contenders of these techniques, ours and PyTorch's; ``single``, the baseline, is first.

    A class of PyTorch that is the counterpart of several techniques takes part once. If it has an
    option for the backend and the ranks are on the CPU, it takes part on our backend as well.

    Args:
        names: the techniques; by default all that split the batch. Those that split the model,
            which are for models that do not fit one device, take part only if they are named.
        device: as in ``RunConfig``.

    Raises:
        ValueError: a name that is not registered.
    """
    for name in names:
        strategies.check_name(name)
    by_default = [name for name in strategies.STRATEGIES if name not in STAGED]
    chosen = [name for name in dict.fromkeys(names or by_default) if name != SINGLE]
    found, seen = [Contender(SINGLE, SINGLE)], {strategies.get(SINGLE)}
    for name in chosen:
        ours, theirs = strategies.get(name), strategies.get(name, builtin=True)
        counterpart = None if theirs is ours else theirs.__name__
        own_pace = issubclass(ours, AsyncParameterServer)
        found.append(Contender(name, name, counterpart=counterpart, own_pace=own_pace))
        if theirs not in seen | {ours}:
            seen.add(theirs)
            found += _builtins(name, theirs, device)
    return found


def _builtins(strategy: str, theirs: type, device: str) -> list[Contender]:
    backends = {theirs.__name__: "auto"}
    if "backend" in theirs.options() and devices.plan(1, device).backend == "gloo":
        backends[f"{theirs.__name__} (labkit)"] = "labkit"
    own_pace = issubclass(theirs, AsyncParameterServer)
    return [Contender(n, strategy, True, b, own_pace=own_pace) for n, b in backends.items()]


@dataclass(frozen=True)
class Setting:
    """The values that are the same for all contenders."""

    world_size: int
    train_size: int
    batch_size: int
    epochs: int

    def text(self) -> str:
        ranks = format_count(self.world_size, "rank")
        return f"{ranks}, {self.train_size} samples, batches of {self.batch_size}"


def settings_of(
    world_sizes: tuple[int, ...],
    train_sizes: tuple[int, ...],
    batch_sizes: tuple[int, ...],
    epochs: int,
    units: int,
) -> list[Setting]:
    """The main setting first, then every setting that differs from it in one value, once.

    Args:
        world_sizes: the main one is the largest with a core (or GPU) for each rank.
        train_sizes: the main one is the largest.
        batch_sizes: the main one is the middle one.
        epochs: of the main setting; the others only measure times, and run three at most.
        units: the number of cores or GPUs.
    """
    fitting = [size for size in world_sizes if size <= units]
    main = max(fitting) if fitting else min(world_sizes)
    sizes, batch = max(train_sizes), statistics.median_low(batch_sizes)
    fewer = min(epochs, _EPOCHS_FOR_TIME)
    settings = [Setting(main, sizes, batch, epochs)]
    settings += [Setting(p, sizes, batch, fewer) for p in world_sizes if p != main]
    settings += [Setting(main, n, batch, fewer) for n in train_sizes if n != sizes]
    settings += [Setting(main, sizes, b, fewer) for b in batch_sizes if b != batch]
    return list(dict.fromkeys(settings))
