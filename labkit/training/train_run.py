"""Start a training run: resolve the settings, start the ranks, gather the result."""

import itertools
import multiprocessing
import os
import signal
import sys
from dataclasses import replace
from functools import partial
from typing import Any

from labkit.comm.emulated_link import EmulatedLink
from labkit.config import RunConfig, parse_link
from labkit.devices import hardware, versions
from labkit.errors import PreemptedError, WorkerError
from labkit.runtime.launch import RunResult, run
from labkit.runtime.pickling import UnpicklableError, find_unpicklable
from labkit.runtime.preload import under_torchrun, warm_up
from labkit.strategies.base import Strategy
from labkit.training.checkpoint import remove_unfinished
from labkit.training.evaluation import TABLE
from labkit.training.loop import RankReport, fit
from labkit.training.own import NOTHING, PARTS, Own, resolved, take_own
from labkit.training.resolve import Resolved, resolve
from labkit.training.result import TrainResult
from labkit.training.resume import Start, find_start, on_sigterm
from labkit.units import MOST_SECONDS, check_above_zero
from labkit.workload.datasets import is_folder


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
    link = str(link) if isinstance(link, EmulatedLink) else link
    if under_torchrun() and not {"world_size", "devices", "split_points"} & settings.keys():
        settings["world_size"] = int(os.environ["WORLD_SIZE"])
    config = RunConfig(strategy=strategy, link=link, **settings)
    return train_run(config, own=own, timeout_s=timeout_s, download=download, verbose=verbose)


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
        PreemptedError: this process was sent SIGTERM, and the ranks have ended with a checkpoint.
    """
    check_above_zero("timeout_s", timeout_s, MOST_SECONDS)
    if not isinstance(verbose, bool):
        raise ValueError(f"verbose must be True or False, got {type(verbose).__name__}")
    given = config
    config, own, (strategy, _, note), start = _begin(config, own, download, timeout_s)
    ranks, devices = config.world_size, config.devices
    if strategy.in_one_process:
        ranks, devices = 1, str(strategy.devices[0])
    may_lose = range(1, ranks) if strategy.survives_lost_workers else ()
    link = EmulatedLink(*parse_link(config.link)) if config.link else None
    settings: dict[str, Any] = {"device": config.device, "devices": devices}
    settings |= {"timeout_s": timeout_s, "hosts": config.hosts}
    work = fit, config, strategy, verbose, own, start.path
    passes_on = config.checkpoint_dir is not None and not under_torchrun()
    try:
        if config.hosts is None:
            warm_up()
        with on_sigterm(_end_ranks if passes_on else None):
            result = run(*work, world_size=ranks, may_lose=may_lose, link=link, **settings)
    except UnpicklableError:
        culprits = (find_unpicklable(name, getattr(own, name)) for name in PARTS)
        if culprit := next(filter(None, culprits), ""):
            raise ValueError(
                f"{culprit} cannot be sent to the ranks, because it cannot be pickled: give a "
                "function that makes it, which each rank calls"
            ) from None
        raise
    except WorkerError as error:
        _, is_preempted, why = error.worker_traceback.rpartition(f"{PreemptedError.__name__}: ")
        if is_preempted:
            raise PreemptedError(why.strip()) from None
        raise
    finally:
        remove_unfinished(config.checkpoint_dir)
    return _gather(given, strategy, result, [note, start.note])


def _begin(
    config: RunConfig, own: Own, download: bool, timeout_s: float
) -> tuple[RunConfig, Own, Resolved, Start]:
    """The settings with full paths, the own parts, what is resolved, and where the run begins."""
    own = resolved(config, own)
    # The ranks may have been started in another folder.
    names = ["weights", "checkpoint_dir", "log_dir", *["dataset"] * is_folder(config.dataset)]
    paths = {name: getattr(config, name) for name in names}
    full = {n: os.path.abspath(os.path.expanduser(path)) for n, path in paths.items() if path}
    config = replace(config, **full) if full else config
    check = partial(resolve, config, own, download)
    begin = partial(find_start, config, own)
    if under_torchrun():
        # Only what torchrun has started needs it.
        from labkit.training.together import agreed

        ready, start = agreed(config, check, begin, timeout_s)
    else:
        ready = check()
        start = begin(ready)
    if start.note:
        print(start.note, file=sys.stderr)
    if config.log_dir is not None and os.environ.get("RANK", "0") == "0":
        os.makedirs(config.log_dir, exist_ok=True)
        if not config.resume and os.path.lexists(os.path.join(config.log_dir, TABLE)):
            raise ValueError(
                f"log_dir {config.log_dir} has the logs of another run ({TABLE}): give another "
                "folder, or continue that run with resume"
            )
    return config, own, ready, start


def _end_ranks() -> None:
    """Let the ranks end together, with a checkpoint; the next SIGTERM ends this process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.name.startswith("labkit-rank-"):
            process.terminate()


def _gather(
    config: RunConfig, strategy: Strategy, result: RunResult, more: list[str]
) -> TrainResult:
    """Combine the reports of the ranks in one result; a lost rank has no report."""
    reports: list[RankReport] = [report for report in result.values if report is not None]
    first, is_counted = reports[0], reports[0].bytes_sent is not None
    assert first.state is not None, "rank 0 is never lost"
    notes: dict[str, Any] = first.notes | ({"lost_ranks": result.lost} if result.lost else {})
    if note := ". ".join(filter(None, (notes.get("note"), *more))):
        notes["note"] = note
    # Threads compute at the same time, so only the main thread's seconds add up to the run's.
    seconds = result.trace.seconds_by_kind(lane=0 if strategy.in_one_process else None)
    trace = result.trace
    if strategy.in_one_process:
        trace = replace(trace, devices={0: ", ".join(dict.fromkeys(map(str, strategy.devices)))})
    by_epoch = [
        [row["phases_s"] for row in rows] for rows in zip(*(one.epochs for one in reports))
    ]
    if first.ends_s:
        # Ranks that did not wait for each other have the phases that the trace has.
        windows = [trace.between(*window) for window in itertools.pairwise(first.ends_s)]
        by_epoch = [[window.seconds_by_kind()] for window in windows]
    ranks = len(result.values)
    return TrainResult(
        config=config,
        epochs=[
            row | {"phases_s": _mean(parts, ranks)} for row, parts in zip(first.epochs, by_epoch)
        ],
        phases_s=_mean([seconds], ranks),
        # A rank that was lost has sent nothing that is known.
        bytes_sent=[r.bytes_sent if r else 0 for r in result.values] if is_counted else None,
        messages=[r.messages if r else 0 for r in result.values] if is_counted else None,
        state=first.state,
        checksums=[report.checksum for report in reports],
        trace=trace,
        hardware=hardware(),
        versions=versions(),
        notes=notes,
        peak_memory=[report and report.peak_memory for report in result.values],
    )


def _mean(parts: list[dict[str, float]], ranks: int) -> dict[str, float]:
    kinds = sorted({kind for seconds in parts for kind in seconds})
    return {kind: sum(one.get(kind, 0.0) for one in parts) / ranks for kind in kinds}
