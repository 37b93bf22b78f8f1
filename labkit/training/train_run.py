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

from labkit.engine.comm.emulated_link import EmulatedLink
from labkit.engine.devices import hardware, print_once, versions
from labkit.engine.errors import PreemptedError, WorkerError
from labkit.engine.runtime.launch import RunResult, run
from labkit.engine.runtime.preload import warm_up
from labkit.engine.started import RANK_NAME, is_rank_0, started_as_rank
from labkit.strategies.base import Strategy
from labkit.training.checkpoint import Start, find_start, on_sigterm, remove_unfinished
from labkit.training.config import RunConfig, parse_link
from labkit.training.kept import Kept
from labkit.training.loop import RankReport, fit
from labkit.training.resolve import resolve
from labkit.training.result import TrainResult
from labkit.training.same_data import Sketch, check_same, sketch
from labkit.training.work import NOTHING, PARTS, Own, imported, take_own
from labkit.workload.datasets import is_folder

# Settings that may differ between machines.
_OF_A_MACHINE = ("devices", "log_dir", "record", "checkpoint_dir", "weights")


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
            ``labkit.training.work.Own``; each rank gets a copy.
            ``result.state`` has the model's own names: ``model.load_state_dict`` takes it.
    """
    own_parts, settings = take_own(settings)
    started = started_as_rank()
    if started is not None:
        settings.setdefault("world_size", started.world_size)
    if link is not None:
        link = str(link)
    config = RunConfig(strategy, link=link, **settings)
    return train_run(
        config, own_parts=own_parts, timeout_s=timeout_s, download=download, verbose=verbose
    )


def train_run(
    config: RunConfig,
    *,
    own_parts: Own = NOTHING,
    timeout_s: float = 24 * 3600,
    download: bool = False,
    verbose: bool = False,
) -> TrainResult:
    """Train on real processes, as ``config`` says, and return the gathered result.

    Args:
        own_parts: the learner's own parts; MODULE:NAME in the config imports one.
        timeout_s: the run's deadline, in seconds.
        download: fetch the data set first if it is absent.
        verbose: print a line per epoch.

    Raises:
        ValueError: impossible settings, or unknown names (the message lists the known ones).
        FileNotFoundError: the data set is absent; the message says how to get it.
        WorkerError: a rank failed.
        PreemptedError: this process was sent SIGTERM, and the ranks have ended with a checkpoint.
    """
    own_parts = imported(config, own_parts)
    given, config = config, _with_full_paths(config)
    link = EmulatedLink(**parse_link(config.link)) if config.link else None
    is_one_of_several = started_as_rank() is not None
    if is_one_of_several:
        strategy, (start, note), data = _begin_together(config, own_parts, download, timeout_s)
    else:
        strategy, (start, note), data = _begin(config, own_parts, download)
    if note and is_rank_0():
        print(note, file=sys.stderr)
    num_ranks = config.world_size
    devices = config.devices
    if strategy.traits.in_one_process:
        num_ranks = 1
        devices = str(strategy.devices[0])
    passes_sigterm_on = config.checkpoint_dir is not None and not is_one_of_several
    try:
        if config.hosts is None:
            warm_up()
        with on_sigterm(_end_ranks if passes_sigterm_on else None):
            result = run(
                *(fit, config, strategy, verbose, own_parts, start, data),
                world_size=num_ranks,
                device=config.device,
                devices=devices,
                hosts=config.hosts,
                timeout_s=timeout_s,
                link=link,
                may_lose=range(1, num_ranks) if strategy.traits.survives_lost_workers else (),
            )
    except WorkerError as error:
        _, mark, message = error.worker_traceback.rpartition(f"{PreemptedError.__name__}: ")
        if mark:
            raise PreemptedError(message.strip()) from None
        raise
    finally:
        remove_unfinished(config.checkpoint_dir)
    return _gather(given, strategy, result, note)


def _with_full_paths(config: RunConfig) -> RunConfig:
    """Return ``config`` with absolute paths: the ranks may have been started in another folder."""
    names = ["weights", "checkpoint_dir", "log_dir", "record"]
    if is_folder(config.dataset):
        names.append("dataset")
    paths = {}
    for name in names:
        path = getattr(config, name)
        if path:
            paths[name] = os.path.abspath(os.path.expanduser(path))
    return replace(config, **paths)


def _begin(config: RunConfig, own_parts: Own, download: bool) -> tuple[Strategy, Start, Sketch]:
    """Return the technique, where the run begins, and a sketch of the data set."""
    strategy, work = resolve(config, own_parts, download)
    if is_rank_0():
        print_once(strategy.start_note())
    kept = Kept(None, None, work.train.dataset)
    before = kept.state()["numbers"]
    data = sketch(work.train, work.test, config.seed)
    is_kept = not torch.equal(before, kept.state()["numbers"])
    path, note = find_start(config, own_parts, strategy, work)
    if path is not None and not {"inputs", "targets"} <= data.keys() and not is_kept:
        note += (
            "; samples of the data set differ from one reading to the next, and this run reads "
            "others than one without an interruption: let them depend on their number alone"
        )
    return strategy, (path, note), data


def _begin_together(
    config: RunConfig, own_parts: Own, download: bool, timeout_s: float
) -> tuple[Strategy, Start, Sketch]:
    """``_begin`` on a launcher's ranks, maybe of other code: all raise one error, or none."""
    # Only what a launcher has started needs it.
    from labkit.engine.runtime import rounds

    launch = rounds.join(timeout_s)
    begun = None
    error = ""
    data = None
    checkpoint = None
    try:
        begun = _begin(config, own_parts, download)
        _, (start, _), data = begun
        checkpoint = start and start.name
    except (ValueError, OSError) as failure:
        error = str(failure)
    same = _common_facts(config, rounds.code()) | {"checkpoint": checkpoint}
    text = json.dumps({"error": error, "same": same, "data": data})
    texts = launch.exchange(text, "the checks before the run")
    reports = [json.loads(text) for text in texts]
    for rank, report in enumerate(reports):
        if report["error"]:
            raise ValueError(f"rank {rank} on {launch.hosts[rank]}: {report['error']}")
    first = reports[0]
    for rank, report in enumerate(reports):
        for name, value in first["same"].items():
            other = report["same"].get(name)
            if other != value:
                raise ValueError(
                    f"rank {rank} on {launch.hosts[rank]} is not of the same run as rank 0 on "
                    f"{launch.hosts[0]}: {name} {value} on rank 0 and {other} on rank {rank}. "
                    "Start the same command with the same versions on every machine"
                )
    for rank, report in enumerate(reports):
        check_same(rank, report["data"], first["data"])
    assert begun is not None, "an error has been raised on all ranks"
    return begun


def _common_facts(config: RunConfig, labkit_code: str) -> dict[str, Any]:
    """Return by name what the processes of one run have in common: settings, versions, code."""
    facts: dict[str, Any] = asdict(config)
    for name in _OF_A_MACHINE:
        del facts[name]
    facts["Python"] = sys.version_info[:2]
    facts["torch"] = torch.__version__
    facts["labkit's code"] = labkit_code
    # Rank 0 writes them.
    facts["--json and --save"] = [a for a in sys.argv if a.startswith(("--json", "--save"))]
    modules = ["__main__"]
    for part in PARTS:
        module, colon, _ = getattr(config, part).partition(":")
        if colon:
            modules.append(module)
    for module in modules:
        file = getattr(sys.modules.get(module), "__file__", None)
        if file:
            digest = hashlib.sha256(Path(file).read_bytes()).hexdigest()
            facts[f"the code of {module}"] = digest[:12]
    return facts


def _end_ranks() -> None:
    """Let the ranks end together, with a checkpoint; the next SIGTERM ends this process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.name.startswith(RANK_NAME):
            process.terminate()


def _gather(config: RunConfig, strategy: Strategy, result: RunResult, note: str) -> TrainResult:
    """Combine the reports of the ranks in one result; a lost rank has no report."""
    reports: list[RankReport] = [report for report in result.values if report is not None]
    first = reports[0]
    assert first.state is not None, "rank 0 is never lost"
    notes = dict(first.notes)
    if result.lost:
        notes["lost_ranks"] = result.lost
    if note:
        notes["note"] = note
    trace = result.trace
    if strategy.traits.in_one_process:
        # Threads compute at the same time: only the main thread's seconds add up to the run's.
        seconds = trace.seconds_by_kind(lane=0)
        names = dict.fromkeys(map(str, strategy.devices))
        trace = replace(trace, devices={0: ", ".join(names)})
    else:
        seconds = trace.seconds_by_kind()
    bytes_sent = messages = None
    if first.bytes_sent is not None:
        # A rank that was lost has sent nothing that is known.
        bytes_sent = [0] * len(result.values)
        messages = [0] * len(result.values)
        for rank, report in enumerate(result.values):
            if report is not None:
                bytes_sent[rank] = report.bytes_sent
                messages[rank] = report.messages
    num_ranks = len(result.values)
    names = ("strategy", "builtin", "batch_size", "compress", "sync_batch_norm", "average_every")
    about = {name: getattr(config, name) for name in names}
    trace = replace(trace, about={**trace.about, **about})
    return TrainResult(
        config=config,
        epochs=first.epochs,
        phases_s={kind: total / num_ranks for kind, total in sorted(seconds.items())},
        bytes_sent=bytes_sent,
        messages=messages,
        state=first.state,
        checksums=[report.checksum for report in reports],
        trace=trace,
        hardware=hardware(),
        versions=versions(),
        notes=notes,
        peak_memory=[report and report.peak_memory for report in result.values],
    )
