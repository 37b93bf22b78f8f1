"""Who takes part, each once, and what all are given alike.

The contenders: every technique that shares out the batch, and PyTorch's own. Their settings: a
main one, and others that differ from it in one thing.
"""

import statistics
from dataclasses import dataclass

from labkit import devices, strategies
from labkit.config import STAGED, RunConfig
from labkit.strategies.base import OwnPaceStrategy
from labkit.units import format_count

SINGLE = "single"
# The first epoch is warm-up, and two more give an epoch's time.
_EPOCHS_FOR_TIME = 3


@dataclass(frozen=True)
class Contender:
    """One technique in one implementation.

    Attributes:
        name: of our own, the strategy's; of PyTorch's, its class, and the backend if it has two.
        strategy, builtin, backend: as in ``RunConfig``.
        counterpart: the name of PyTorch's own, for ours.
        own_pace: its ranks do not keep step, so it need not end where one device does.
    """

    name: str
    strategy: str
    builtin: bool = False
    backend: str = "auto"
    counterpart: str | None = None
    own_pace: bool = False

    def config(self, world_size: int, **settings) -> RunConfig:
        """The run of this contender; ``single`` stays on its one rank."""
        return RunConfig(
            strategy=self.strategy,
            builtin=self.builtin,
            backend=self.backend,
            world_size=1 if self.strategy == SINGLE else world_size,
            **settings,
        )


def find_contenders(names: tuple[str, ...] = (), device: str = "auto") -> list[Contender]:
    """Ours and PyTorch's of these techniques, ``single`` first: it is the yardstick.

    By default those that share out the batch. Those that share out the model, for one that does
    not fit a device, take part when they are named.

    One class can be PyTorch's counterpart of several techniques; it takes part once. Where it
    takes a backend and the ranks are on the CPU, it takes part on ours, too.

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
        own_pace = issubclass(ours, OwnPaceStrategy)
        found.append(Contender(name, name, counterpart=counterpart, own_pace=own_pace))
        if theirs not in seen | {ours}:
            seen.add(theirs)
            found += _builtins(name, theirs, device)
    return found


def _builtins(strategy: str, theirs: type, device: str) -> list[Contender]:
    backends = {theirs.__name__: "auto"}
    if "backend" in theirs.options() and devices.plan(1, device).backend == "gloo":
        backends[f"{theirs.__name__} (labkit)"] = "labkit"
    own_pace = issubclass(theirs, OwnPaceStrategy)
    return [Contender(n, strategy, True, b, own_pace=own_pace) for n, b in backends.items()]


@dataclass(frozen=True)
class Setting:
    """What all contenders of a run are given alike."""

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
    """The main setting first, then each that differs from it in one thing, once.

    Args:
        world_sizes: the main one is the largest with a core (or GPU) for each rank.
        train_sizes: the main one is the largest.
        batch_sizes: the main one is the middle one.
        epochs: of the main setting; the others serve only for times, and run three at most.
        units: cores or GPUs.
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
