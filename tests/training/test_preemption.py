"""SIGTERM: the ranks agree on a step without a message per step, and end after it."""

import os
import signal
import time

import ranks
import torch.distributed as dist
from labkit.training.preemption import Preemption

from labkit import run
from labkit.errors import PreemptedError
from labkit.runtime import rounds

ranks.travel_by_value(__name__)


def steps_until_told(comm, folder, told, lost):
    """Steps in which the ranks wait for each other; the rank ``told`` gets the signal."""
    store = dist.FileStore(f"{folder}/store", comm.world_size)
    names = ["host"] * comm.world_size
    here = comm.rank, comm.world_size, names, names, [0.0] * comm.world_size, "n", store
    rounds._joined = rounds.Round(*here)
    before = signal.getsignal(signal.SIGTERM)
    done, found = 0, ""
    try:
        with Preemption(comm, saves=True) as preemption:
            preemption.begin(0)
            while not preemption.ends_after(done):
                if done == 5 and comm.rank == told:
                    os.kill(os.getpid(), signal.SIGTERM)
                if done == 5 and comm.rank == lost:
                    raise RuntimeError("lost")
                # Ranks are not equally fast, and some are a step ahead.
                time.sleep(0.01 * comm.rank)
                if lost is None:
                    comm.barrier()
                done += 1
    except (RuntimeError, PreemptedError) as error:
        found = str(error)
    assert signal.getsignal(signal.SIGTERM) == before
    return done, found


def test_all_ranks_end_after_the_same_step(tmp_path):
    found = run(steps_until_told, str(tmp_path), 1, None, world_size=3).values
    assert len(set(found)) == 1
    assert found[0][0] > 5


def test_ranks_do_not_wait_for_one_that_has_failed(tmp_path):
    found = run(steps_until_told, str(tmp_path), 1, 0, world_size=3).values
    assert found[0] == (5, "lost")
    assert [told for _, told in found[1:]] == [
        "stopped by SIGTERM, without a checkpoint: a rank is gone"
    ] * 2


def test_without_torchrun_the_signal_does_what_it_did():
    def rank(comm):
        with Preemption(comm, saves=True) as preemption:
            preemption.begin(0)
            handler = signal.getsignal(signal.SIGTERM)
            return handler == signal.SIG_DFL, preemption.ends_after(3)

    assert run(rank, world_size=1).values == [(True, False)]
