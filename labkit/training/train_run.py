"""Start a training run: resolve the settings, start the ranks, gather the result."""

import hashlib
import json
import multiprocessing
import os
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from labkit.comm.emulated_link import EmulatedLink
from labkit.config import RunConfig, parse_link
from labkit.devices import hardware, versions
from labkit.errors import PreemptedError, WorkerError
from labkit.runtime.launch import RunResult, run
from labkit.runtime.preload import warm_up
from labkit.started import RANK_NAME, is_rank_0, started_as_rank
from labkit.strategies.base import Strategy
from labkit.training.checkpoint import Start, find_start, on_sigterm, remove_unfinished
from labkit.training.kept import Kept
from labkit.training.loop import RankReport, fit
from labkit.training.resolve import NOTHING, PARTS, Own, imported, resolve, take_own
from labkit.training.result import TrainResult
from labkit.training.same_data import Sketch, check_same, sketch
from labkit.workload.datasets import is_folder

# What may differ between machines.
_OF_A_MACHINE = ("devices", "log_dir", "checkpoint_dir", "weights")


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
        timeout_s, download, verbose: see ``train_run``, whose errors it raises.
        link: an emulated link, or the same as text, ``"10ms,100MB/s"``; None for no emulation.
        settings: the other fields of ``RunConfig``; in a rank of torchrun or of another launcher
            ``world_size`` is what that has started, if left out. ``model``, ``dataset``,
            ``loss`` and ``optimizer`` may be your own objects, see
            ``labkit.training.resolve.Own``; each rank gets a copy.
            ``result.state`` has the model's own names: ``model.load_state_dict`` takes it.
    """
    own, settings = take_own(settings)
    if (started := started_as_rank()) is not None:
        settings.setdefault("world_size", started.world_size)
    config = RunConfig(strategy, link=None if link is None else str(link), **settings)
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
    given, own = config, imported(config, own)
    # The ranks may have been started in another folder.
    names = ["weights", "checkpoint_dir", "log_dir", *["dataset"] * is_folder(config.dataset)]
    paths = {name: path for name in names if (path := getattr(config, name))}
    full = {name: os.path.abspath(os.path.expanduser(path)) for name, path in paths.items()}
    config = replace(config, **full)
    link = EmulatedLink(**parse_link(config.link)) if config.link else None
    is_one_of_several = started_as_rank() is not None
    begin = _begin_together if is_one_of_several else _begin
    strategy, (start, note), data = begin(config, own, download, timeout_s)
    if note and is_rank_0():
        print(note, file=sys.stderr)
    ranks, devices = config.world_size, config.devices
    if strategy.in_one_process:
        ranks, devices = 1, str(strategy.devices[0])
    passes_on = config.checkpoint_dir is not None and not is_one_of_several
    try:
        if config.hosts is None:
            warm_up()
        with on_sigterm(_end_ranks if passes_on else None):
            result = run(
                *(fit, config, strategy, verbose, own, start, data),
                world_size=ranks,
                device=config.device,
                devices=devices,
                hosts=config.hosts,
                timeout_s=timeout_s,
                link=link,
                may_lose=range(1, ranks) if strategy.survives_lost_workers else (),
            )
    except WorkerError as error:
        _, is_preempted, why = error.worker_traceback.rpartition(f"{PreemptedError.__name__}: ")
        if is_preempted:
            raise PreemptedError(why.strip()) from None
        raise
    finally:
        remove_unfinished(config.checkpoint_dir)
    return _gather(given, strategy, result, note)


def _begin(
    config: RunConfig, own: Own, download: bool, timeout_s: float
) -> tuple[Strategy, Start, Sketch]:
    """The technique, where the run begins, and a sketch of the data set."""
    strategy, work = resolve(config, own, download)
    kept = Kept(None, None, work.train.dataset)
    before = kept.state()["numbers"]
    data = sketch(work.train, work.test, config.seed)
    is_kept = not torch.equal(before, kept.state()["numbers"])
    path, note = find_start(config, own, strategy, work)
    if path is not None and not {"inputs", "targets"} <= data.keys() and not is_kept:
        note += (
            "; samples of the data set differ from one reading to the next, and this run reads "
            "others than one without an interruption: let them depend on their number alone"
        )
    return strategy, (path, note), data


def _begin_together(
    config: RunConfig, own: Own, download: bool, timeout_s: float
) -> tuple[Strategy, Start, Sketch]:
    """``_begin`` on a launcher's ranks, maybe of other code: all raise one error, or none."""
    # Only what a launcher has started needs it.
    from labkit.runtime import rounds

    found = rounds.join(timeout_s)
    begun, error = None, ""
    try:
        begun = _begin(config, own, download, timeout_s)
    except (ValueError, OSError) as failure:
        error = str(failure)
    same = {k: v for k, v in asdict(config).items() if k not in _OF_A_MACHINE}
    same |= {"Python": sys.version_info[:2], "torch": torch.__version__}
    same["labkit's code"] = rounds.code()
    # Rank 0 writes them.
    same["--json and --save"] = [w for w in sys.argv if w.startswith(("--json", "--save"))]
    same["checkpoint"] = begun and begun[1][0] and begun[1][0].name
    paths = [path for name in PARTS if ":" in (path := getattr(config, name))]
    for name in ("__main__", *(path.partition(":")[0] for path in paths)):
        if file := getattr(sys.modules.get(name), "__file__", None):
            same[f"the code of {name}"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    words = json.dumps({"error": error, "same": same, "data": begun and begun[2]})
    everyone = [json.loads(text) for text in found.exchange(words, "the checks before the run")]
    for rank, one in enumerate(everyone):
        if one["error"]:
            raise ValueError(f"rank {rank} on {found.hosts[rank]}: {one['error']}")
    for rank, one in enumerate(everyone):
        for name, value in everyone[0]["same"].items():
            if (theirs := one["same"].get(name)) != value:
                raise ValueError(
                    f"rank {rank} on {found.hosts[rank]} is not of the same run as rank 0 on "
                    f"{found.hosts[0]}: {name} {value} on rank 0 and {theirs} on rank {rank}. "
                    "Start the same command with the same versions on every machine"
                )
    for rank, one in enumerate(everyone):
        check_same(rank, one["data"], everyone[0]["data"])
    assert begun is not None, "an error has been raised on all ranks"
    return begun


def _end_ranks() -> None:
    """Let the ranks end together, with a checkpoint; the next SIGTERM ends this process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.name.startswith(RANK_NAME):
            process.terminate()


def _gather(config: RunConfig, strategy: Strategy, result: RunResult, note: str) -> TrainResult:
    """Combine the reports of the ranks in one result; a lost rank has no report."""
    reports: list[RankReport] = [report for report in result.values if report is not None]
    first, trace, ranks = reports[0], result.trace, len(result.values)
    assert first.state is not None, "rank 0 is never lost"
    notes = first.notes | ({"lost_ranks": result.lost} if result.lost else {})
    if note:
        notes["note"] = note
    # Threads compute at the same time, so only the main thread's seconds add up to the run's.
    seconds = trace.seconds_by_kind(lane=0 if strategy.in_one_process else None)
    if strategy.in_one_process:
        trace = replace(trace, devices={0: ", ".join(dict.fromkeys(map(str, strategy.devices)))})
    # A rank that was lost has sent nothing that is known.
    sent = [(one.bytes_sent, one.messages) if one else (0, 0) for one in result.values]
    is_counted = first.bytes_sent is not None
    return TrainResult(
        config=config,
        epochs=first.epochs,
        phases_s={kind: total / ranks for kind, total in sorted(seconds.items())},
        bytes_sent=[num_bytes for num_bytes, _ in sent] if is_counted else None,
        messages=[messages for _, messages in sent] if is_counted else None,
        state=first.state,
        checksums=[report.checksum for report in reports],
        trace=trace,
        hardware=hardware(),
        versions=versions(),
        notes=notes,
        peak_memory=[report and report.peak_memory for report in result.values],
    )
