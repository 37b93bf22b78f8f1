"""Start a training run: check the settings, start the ranks, gather the result."""

from typing import Any

from labkit.config import RunConfig
from labkit.devices import hardware, versions
from labkit.runtime.launch import RunResult, run
from labkit.strategies.base import Strategy
from labkit.training.loop import fit
from labkit.training.make_strategy import make_strategy
from labkit.training.result import TrainResult
from labkit.units import MOST_SECONDS, check_above_zero, check_keywords, spelled
from labkit.workload.datasets import load_dataset

# The arguments of ``train_with`` that are not fields of ``RunConfig``.
_OPTIONS = ("timeout_s", "download", "verbose")


def train_with(
    strategy: str,
    *,
    timeout_s: float = 24 * 3600,
    download: bool = False,
    verbose: bool = False,
    **settings: Any,
) -> TrainResult:
    """Train with one technique on real processes: ``train_with("ring_all_reduce", world_size=4)``.

    Args:
        strategy: the technique, one of ``labkit.strategies.STRATEGIES``.
        timeout_s, download, verbose: see ``train_run``.
        settings: the other fields of ``RunConfig``.

    Raises:
        The errors of ``train_run``.
    """
    check_keywords("train_with", settings, [*_OPTIONS, *RunConfig.__dataclass_fields__])
    config = RunConfig(strategy=strategy, **settings)
    return train_run(config, timeout_s=timeout_s, download=download, verbose=verbose)


@spelled
def train_run(
    config: RunConfig,
    *,
    timeout_s: float = 24 * 3600,
    download: bool = False,
    verbose: bool = False,
) -> TrainResult:
    """Train on real processes, as ``config`` says, and return the gathered result.

    Args:
        config: the settings.
        timeout_s: the run's deadline, in seconds.
        download: fetch the data set first if it is absent.
        verbose: print a line per epoch.

    Raises:
        ValueError: impossible settings, or unknown names (the message lists the known ones).
        FileNotFoundError: the data set is absent; the message says how to get it.
        WorkerError: a rank failed.
    """
    check_above_zero("timeout_s", timeout_s, MOST_SECONDS)
    strategy = make_strategy(config, download=download)
    load_dataset(config.dataset, train_size=config.train_size, download=download)
    ranks, device = config.world_size, config.device
    if strategy.in_one_process:
        ranks, device = 1, strategy.devices[0].type
    may_lose = range(1, ranks) if strategy.survives_lost_workers else ()
    settings = {"device": device, "transport": config.transport, "timeout_s": timeout_s}
    work = fit, config, strategy, verbose
    result = run(*work, world_size=ranks, may_lose=may_lose, **settings)
    return _gather(config, strategy, result)


def _gather(config: RunConfig, strategy: Strategy, result: RunResult) -> TrainResult:
    """Combine the reports of the ranks in one result; a lost rank has no report."""
    reports = [report for report in result.values if report is not None]
    first, is_counted = reports[0], reports[0].bytes_sent is not None
    # Threads compute at the same time, so only the main thread's seconds add up to the run's.
    seconds = result.trace.seconds_by_kind(lane=0 if strategy.in_one_process else None)
    return TrainResult(
        config=config,
        epochs=first.epochs,
        phases_s={kind: s / len(result.values) for kind, s in seconds.items()},
        bytes_sent=_by_rank(result, "bytes_sent") if is_counted else None,
        messages=_by_rank(result, "messages") if is_counted else None,
        state=first.state,
        checksums=[report.checksum for report in reports],
        trace=result.trace,
        hardware=hardware(),
        versions=versions(),
        notes=first.notes | ({"lost_ranks": result.lost} if result.lost else {}),
    )


def _by_rank(result: RunResult, count: str) -> list[int]:
    """A count from every rank's report, 0 for a rank that was lost."""
    return [getattr(report, count, 0) for report in result.values]
