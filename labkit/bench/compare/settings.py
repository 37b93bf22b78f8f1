"""What all contenders are given alike: a main setting, and others that differ in one thing."""

import statistics
from dataclasses import dataclass

from labkit.units import format_count

# The first epoch is warm-up, and two more give an epoch's time.
_EPOCHS_FOR_TIME = 3


@dataclass(frozen=True)
class Setting:
    """What all contenders are given alike."""

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
