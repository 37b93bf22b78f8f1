"""Who takes part: every technique that shares out the batch, and PyTorch's own, each once."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit import devices, strategies
from labkit.config import STAGED, RunConfig

SINGLE = "single"


@dataclass(frozen=True)
class Contender:
    """One technique in one implementation.

    Attributes:
        name: of ours, the strategy's; of PyTorch's, its class, with the backend where it takes
            part on two.
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

    def config(self, world_size: int, **settings: Any) -> RunConfig:
        """The run of this contender; ``single`` stays on its one rank."""
        return RunConfig(
            strategy=self.strategy,
            builtin=self.builtin,
            backend=self.backend,
            world_size=1 if self.strategy == SINGLE else world_size,
            **settings,
        )


def find_contenders(names: tuple[str, ...] = (), device: str = "auto") -> list[Contender]:
    """Ours and PyTorch's of these techniques; ``single`` comes first, as the yardstick.

    By default they are those that share out the batch. Those that share out the model, for a model
    that does not fit on one device, take part when they are named.

    One class can be PyTorch's counterpart of several techniques; it takes part once. Where it
    takes a backend and the ranks are on the CPU, it takes part on our backend, too.

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
        found.append(Contender(name, name, counterpart=counterpart, own_pace=_own_pace(ours)))
        if theirs not in seen | {ours}:
            seen.add(theirs)
            found += _builtins(name, theirs, device)
    return found


def _own_pace(strategy: Callable[..., Any]) -> bool:
    return hasattr(strategy, "train")


def _builtins(strategy: str, theirs: Callable[..., Any], device: str) -> list[Contender]:
    own_pace = _own_pace(theirs)
    plain = Contender(theirs.__name__, strategy, builtin=True, own_pace=own_pace)
    on_cpu = devices.plan(1, device).backend == "gloo"
    if "backend" not in inspect.signature(theirs).parameters or not on_cpu:
        return [plain]
    on_ours = f"{theirs.__name__} (labkit)"
    return [plain, Contender(on_ours, strategy, True, "labkit", own_pace=own_pace)]
