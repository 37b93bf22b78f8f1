"""CheckpointWriter: copy the tensors, go on training, write in the background, rename when whole.

All ranks write their parts into one hidden folder, each as one file. When the last has written,
rank 0 adds ``.metadata`` and ``labkit.json``, and renames the folder. The files are those of
PyTorch's ``FileSystemWriter``. Its ``dcp.save`` is not used, because it carries its plans as
pickles through gloo's sockets, each time anew; here texts go through them.

Sources: ``torch.distributed.checkpoint.state_dict_saver``; PyTorch's tutorial "Asynchronous Saving
with Distributed Checkpoint (DCP)".
"""

import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.comm.comm import Comm
from labkit.errors import OutputError
from labkit.training.checkpoint import folder as places
from labkit.training.checkpoint.parts import add_facts, write_part
from labkit.training.checkpoint.plan import Copies, Plan, described, flattened, plan_of
from labkit.training.checkpoint.space import check_space, explained
from labkit.training.checkpoint.stream import Pace, StoppedError
from labkit.training.checkpoint.texts import Texts
from labkit.training.checkpoint.whole import plain, why_not_taken

# How long a writing that was given up may take to end.
_PATIENCE_S = 2.0


@dataclass(frozen=True)
class _Job:
    """One checkpoint that is being written."""

    step: int
    unfinished: Path
    facts: dict[str, Any]
    best: bool


class CheckpointWriter:
    """Writes the checkpoints of a run into one folder; made by all ranks together.

    ``save`` copies the tensors and returns; a thread writes the copies while the training goes on.
    One checkpoint is written at a time: a ``save`` that comes too early waits for the one before,
    so that which checkpoints a run has written does not depend on how fast the disk is, and there
    is one copy of the tensors at most. An error of the writing is raised by the next ``save`` or
    ``wait``, by all ranks at the same call, and the older checkpoints stay as they are.

    As a context manager it waits for the writing at the end of the block, or gives it up if the
    block raises. A ``Comm`` of one rank needs no process group, also inside a larger run.

    Args:
        comm: this rank's Comm.
        folder: where the checkpoints are; it is made if there is none.
        keep: how many of the newest checkpoints stay, beside the best.

    Attributes:
        last_s: how long the thread wrote at the last checkpoint, with its rests, in seconds.
        last_computed_s: how long it computed meanwhile.

    Raises:
        OutputError: on all ranks: the folder cannot be made or written to, or another run writes
            there.
    """

    def __init__(self, comm: Comm, folder: str | Path, keep: int = 2):
        self.folder, self.keep = Path(os.path.abspath(folder)), keep
        self._rank = comm.rank
        self._texts = Texts(comm)
        self._copies, self._pace = Copies(), Pace()
        self._plan: Plan | None = None
        self._known: list[str] = []
        self._thread: threading.Thread | None = None
        # An interrupted ``Thread.join`` takes its thread for one that has ended.
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self.last_s = self.last_computed_s = 0.0
        self._unfinished: Path | None = None
        # Names in the folder: of what this run has written, and of what it knows to be whole.
        self._written: set[str] = set()
        self._whole: set[str] = set()
        self._lock: places.Lock | None = None
        self._together(self._open)

    def _open(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"cannot write checkpoints to {self.folder}: {error.strerror}"
            ) from None
        self._lock = places.Lock(self.folder)
        places.clean(self.folder, self._lock)

    def _together(self, action: Any) -> str:
        """Call ``action`` on rank 0; on all ranks return its text, or raise its OutputError."""
        told = {"text": "", "error": ""}
        if self._rank == 0:
            try:
                told["text"] = str(action() or "")
            except OutputError as error:
                told["error"] = str(error)
        first = json.loads(self._texts.exchange(json.dumps(told))[0])
        if first["error"]:
            raise OutputError(first["error"])
        return first["text"]

    def save(
        self,
        step: int,
        tensors: Mapping[str, Any],
        facts: Mapping[str, Any],
        best: bool = False,
    ) -> None:
        """Save a checkpoint; called by all ranks, returns when the tensors are copied.

        Args:
            step: updates so far: the number in the checkpoint's name. An older checkpoint of that
                number is replaced.
            tensors: nested dicts of this rank's tensors. Ranks may have different ones. What has
                the same place on several ranks must be equal there, and is written by one of them.
            facts: what JSON can hold; those of rank 0 are written.
            best: whether the link ``best`` is to lead to this checkpoint from now on, and to keep
                it from being removed.

        Raises:
            ValueError: something cannot be stored, or the ranks contradict each other.
            OutputError: this checkpoint cannot be begun, or the one before could not be written.
        """
        self.wait()
        mine, kept = flattened(tensors), plain(facts)
        plan = self._agreed(step, best, described(mine))
        unfinished = Path(self._together(self._begin))
        self._copies.take(mine, plan.paths)
        self._pace.hurry.clear()
        self._ended.clear()
        job = _Job(step, unfinished, kept, best)
        self._thread = threading.Thread(
            target=self._write, args=(job, plan), name="labkit-checkpoint", daemon=True
        )
        self._thread.start()

    def _agreed(self, step: int, best: bool, text: str) -> Plan:
        """The plan of this checkpoint: that of the one before, if all tensors have stayed."""
        digest = hashlib.sha256(text.encode()).hexdigest()
        told = self._texts.exchange(json.dumps([step, best, digest]))
        calls = [json.loads(one) for one in told]
        for rank, call in enumerate(calls):
            if call[:2] != calls[0][:2]:
                raise ValueError(
                    f"the ranks save different checkpoints: step {calls[0][0]}, best "
                    f"{calls[0][1]} on rank 0, and step {call[0]}, best {call[1]} on rank {rank}"
                )
        digests = [call[2] for call in calls]
        if self._plan is None or digests != self._known:
            self._plan = plan_of(self._rank, self._texts.exchange(text))
            self._known = digests
        return self._plan

    def _begin(self) -> str:
        # Known before it is made: an interrupt can come between any two lines.
        self._unfinished = places.hidden(self.folder)
        try:
            self._unfinished.mkdir()
        except OSError as error:
            raise OutputError(
                f"cannot write a checkpoint to {self.folder}: {error.strerror}"
            ) from None
        return str(self._unfinished)

    def _write(self, job: _Job, plan: Plan) -> None:
        """The thread: write this rank's part; on rank 0 also complete the checkpoint."""
        begun_s, computed_s = time.monotonic(), time.thread_time()
        try:
            self._pace.begin()
            self._copies.wait()
            parts = self._each(job, plan, lambda: self._write_part(job, plan))
            self._each(job, plan, lambda: self._complete(job, plan, parts))
        except BaseException as error:
            self._error = error
            self._remove_unfinished()
        finally:
            self.last_s = time.monotonic() - begun_s
            self.last_computed_s = time.thread_time() - computed_s
            self._ended.set()

    def _remove_unfinished(self) -> None:
        if self._rank == 0 and self._unfinished is not None:
            places.remove(self._unfinished)

    def _each(self, job: _Job, plan: Plan, action: Any) -> list[dict[str, Any]]:
        """Call ``action`` on every rank; return what it returned on all, or raise one's error."""
        told: dict[str, Any]
        try:
            told = {"part": action()}
        except StoppedError:
            raise
        except Exception as error:
            told = {"error": explained(error, places.step_path(self.folder, job.step), plan)}
        all_told = [json.loads(text) for text in self._texts.exchange(json.dumps(told))]
        for one in all_told:
            if "error" in one:
                raise OutputError(one["error"])
        return [one["part"] for one in all_told]

    def _write_part(self, job: _Job, plan: Plan) -> dict[str, Any]:
        check_space(self.folder, plan)
        return write_part(job.unfinished, plan, self._copies, self._pace)

    def _complete(self, job: _Job, plan: Plan, parts: list[dict[str, Any]]) -> None:
        if self._rank != 0:
            return
        path = places.step_path(self.folder, job.step)
        add_facts(job.unfinished, job.step, job.facts, plan.metadata, parts, self._pace)
        places.publish(job.unfinished, path, replace=path.name in self._written)
        self._written.add(path.name)
        self._whole.add(path.name)
        if job.best:
            places.mark_best(self.folder, path)
        self._remove_old(job.step)

    def _remove_old(self, step: int) -> None:
        """Remove whole checkpoints beyond the newest ``keep``, but for the best.

        What is damaged neither counts nor is removed: somebody may want to look at it.
        """
        best, kept = places.best_name(self.folder), 0
        for number, path in places.steps(self.folder):
            if number > step or (path.name not in self._whole and why_not_taken(path)):
                continue
            self._whole.add(path.name)
            kept += 1
            if kept > self.keep and path.name != best:
                places.remove(path)

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written, or waits for the other ranks' parts."""
        return self._thread is not None and not self._ended.is_set()

    def wait(self) -> None:
        """Wait until the checkpoint is whole, and as fast as possible.

        Raises:
            OutputError: on all ranks: it could not be written.
            PeerLostError: another rank has ended.
        """
        self._pace.hurry.set()
        # A thread that an interrupt has kept from starting never ends.
        while self._thread is not None and not self._ended.wait(_PATIENCE_S):
            if self._thread.ident is None:
                break
        self._thread = self._unfinished = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Wait for the writing, and give back what the writer holds; called by all ranks.

        Raises the errors of ``wait``.
        """
        try:
            self.wait()
        finally:
            self._leave()

    def abandon(self) -> None:
        """Give up the writing, after a failure, and wait for no other rank."""
        self._pace.stopped = True
        self._pace.hurry.set()
        if self._thread is not None:
            self._ended.wait(_PATIENCE_S)
        self._remove_unfinished()
        self._leave()

    def _leave(self) -> None:
        if self._lock is not None:
            self._lock.release()
        self._texts.close()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()
