"""Start a training run: check the settings, start the ranks, gather the result."""

import itertools
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from labkit.comm.emulated_link import EmulatedLink
from labkit.config import RunConfig, parse_link
from labkit.devices import hardware, versions
from labkit.runtime.launch import RunResult, run
from labkit.runtime.pickling import UnpicklableError
from labkit.runtime.preload import under_torchrun, warm_up
from labkit.strategies.base import Strategy
from labkit.tracing import Trace
from labkit.training.check_work import check_work
from labkit.training.checkpoint import remove_unfinished
from labkit.training.data import check_samples, with_full_paths
from labkit.training.logs import check_log_dir
from labkit.training.loop import RankReport, fit
from labkit.training.make_strategy import make_strategy
from labkit.training.own import NOTHING, Own, resolved, take_own, why_not_sent
from labkit.training.result import TrainResult
from labkit.training.resume import Start, agents
from labkit.training.together import ready
from labkit.units import MOST_SECONDS, check_above_zero, check_keywords, spelled

# The arguments of ``train_with`` that are not fields of ``RunConfig``.
_OPTIONS = ("timeout_s", "download", "verbose")


def train_with(
    strategy: str,
    *,
    timeout_s: float = 24 * 3600,
    download: bool = False,
    verbose: bool = False,
    link: EmulatedLink | str | None = None,
    **settings: Any,
) -> TrainResult:
    """Train with one technique on real processes: ``train_with("ring_all_reduce", world_size=4)``.

    Args:
        strategy: the technique, one of ``labkit.strategies.STRATEGIES``.
        timeout_s, download, verbose: see ``train_run``.
        link: an emulated link, or the same as text, ``"10ms,100MB/s"``; None for no emulation.
        settings: the other fields of ``RunConfig``; under torchrun ``world_size`` is what it has
            started, if left out. ``model``, ``dataset``, ``loss`` and
            ``optimizer`` may be your own objects, see ``labkit.training.own.Own``; each rank gets
            a copy. ``result.state`` has the model's own names: ``model.load_state_dict`` takes it.

    Raises:
        The errors of ``train_run``.
    """
    own, settings = take_own(settings)
    check_keywords("train_with", settings, [*_OPTIONS, *RunConfig.__dataclass_fields__])
    link = str(link) if isinstance(link, EmulatedLink) else link
    if under_torchrun() and not {"world_size", "devices", "split_points"} & settings.keys():
        settings["world_size"] = int(os.environ["WORLD_SIZE"])
    config = RunConfig(strategy=strategy, link=link, **settings)
    return train_run(config, own=own, timeout_s=timeout_s, download=download, verbose=verbose)


@spelled
def train_run(
    config: RunConfig,
    *,
    own: Own = NOTHING,
    timeout_s: float = 24 * 3600,
    download: bool = False,
    verbose: bool = False,
) -> TrainResult:
    """Train on real processes, as ``config`` says, and return the gathered result.

    Args:
        config: the settings.
        own: the learner's own parts; MODULE:NAME in the config imports one.
        timeout_s: the run's deadline, in seconds.
        download: fetch the data set first if it is absent.
        verbose: print a line per epoch.

    Raises:
        ValueError: impossible settings, or unknown names (the message lists the known ones).
        FileNotFoundError: the data set is absent; the message says how to get it.
        WorkerError: a rank failed.
    """
    check_above_zero("timeout_s", timeout_s, MOST_SECONDS)
    if not isinstance(verbose, bool):
        raise ValueError(f"verbose must be True or False, got {type(verbose).__name__}")
    own = resolved(config, own)
    strategy, note, start = ready(config, own, partial(_check, config, own, download), timeout_s)
    ranks, devices = config.world_size, config.devices
    if strategy.in_one_process:
        ranks, devices = 1, str(strategy.devices[0])
    may_lose = range(1, ranks) if strategy.survives_lost_workers else ()
    link = EmulatedLink(*parse_link(config.link)) if config.link else None
    settings: dict[str, Any] = {"device": config.device, "devices": devices}
    settings |= {"transport": config.transport, "timeout_s": timeout_s, "hosts": config.hosts}
    work = fit, with_full_paths(_with_logs(config, start)), strategy, verbose, own, start.path
    try:
        if config.hosts is None:
            warm_up()
        result = run(*work, world_size=ranks, may_lose=may_lose, link=link, **settings)
    except UnpicklableError as error:
        raise ValueError(why_not_sent(own) or str(error)) from None
    finally:
        remove_unfinished(config.checkpoint_dir)
    return _gather(config, strategy, result, [note, start.told])


def _check(config: RunConfig, own: Own, download: bool) -> tuple[Strategy, str]:
    """The technique, and a note, if this run is possible here."""
    strategy = make_strategy(config, own=own, download=download)
    check_samples(config, own, download)
    return strategy, check_work(config, own, strategy)


def _gather(
    config: RunConfig, strategy: Strategy, result: RunResult, told: Sequence[str]
) -> TrainResult:
    """Combine the reports of the ranks in one result; a lost rank has no report."""
    reports = [report for report in result.values if report is not None]
    first, is_counted = reports[0], reports[0].bytes_sent is not None
    # Threads compute at the same time, so only the main thread's seconds add up to the run's.
    notes = first.notes | ({"lost_ranks": result.lost} if result.lost else {})
    if config.scale_lr is not None:
        notes["used_lr"] = config.used_lr
    if note := ". ".join(filter(None, (notes.get("note"), *told))):
        notes["note"] = note
    seconds = result.trace.seconds_by_kind(lane=0 if strategy.in_one_process else None)
    return TrainResult(
        config=config,
        epochs=_with_phases(first, result),
        phases_s={kind: s / len(result.values) for kind, s in seconds.items()},
        bytes_sent=_by_rank(result, "bytes_sent") if is_counted else None,
        messages=_by_rank(result, "messages") if is_counted else None,
        state=first.state,
        checksums=[report.checksum for report in reports],
        trace=_on_devices(result.trace, strategy),
        hardware=hardware(),
        versions=versions(),
        notes=notes,
        peak_memory=[report and report.peak_memory for report in result.values],
    )


def _with_logs(config: RunConfig, start: Start) -> RunConfig:
    """The config for the ranks: with the whole path of its log folder, which is ready for them."""
    if config.log_dir is None:
        return config
    rank = int(os.environ["RANK"]) if under_torchrun() else None
    resumed = config.resume or start.path is not None
    check_log_dir(config.log_dir, resumed, rank, agents())
    return replace(config, log_dir=os.path.abspath(config.log_dir))


def _with_phases(first: RankReport, result: RunResult) -> list[dict[str, Any]]:
    """The epochs; where ranks did not wait for each other, with the phases that the trace has."""
    if not first.ends_s:
        return first.epochs
    before = len(first.epochs) - len(first.ends_s) + 1
    # An earlier process has the spans of the epochs before it was stopped.
    rows = [row | {"phases_s": {}} for row in first.epochs[:before]]
    for row, window in zip(first.epochs[before:], itertools.pairwise(first.ends_s)):
        seconds = result.trace.between(*window).seconds_by_kind()
        # The training stops for these.
        inside = {k: s for k, s in seconds.items() if k not in ("evaluate", "checkpoint")}
        rows.append(row | {"phases_s": {k: s / len(result.values) for k, s in inside.items()}})
    return rows


def _on_devices(trace: Trace, strategy: Strategy) -> Trace:
    """The trace; that of a technique in one process with all of its devices."""
    if not strategy.in_one_process:
        return trace
    return replace(trace, devices={0: ", ".join(dict.fromkeys(map(str, strategy.devices)))})


def _by_rank(result: RunResult, count: str) -> list[int]:
    """A count from every rank's report, 0 for a rank that was lost."""
    return [getattr(report, count, 0) for report in result.values]
