"""Horovod's interface when something goes wrong: who is told what, what ends, what goes on."""

import os
import signal
import threading
import time
from functools import partial

import pytest
import torch
from hosts import on_hosts
from ranks import leftovers, running_ranks, wait_until

import labkit.horovod as hvd
from labkit import WorkerError, run
from labkit.engine.errors import PeerLostError


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = leftovers()
    yield
    assert wait_until(lambda: not running_ranks(), 60)
    assert leftovers() <= before


def total(tensor, name=None):
    return hvd.allreduce(tensor, name=name, op=hvd.Sum)


# ---- the last rank does something else than the others, which wait for it


def raises():
    raise KeyError("of the learner")


def is_killed():
    os.kill(os.getpid(), signal.SIGKILL)


def leaves():
    raise SystemExit(0)


def wants_another():
    total(torch.ones(2), "another")


FAULTS = {
    raises: "raised KeyError: 'of the learner'",
    is_killed: "was killed by SIGKILL",
    leaves: "called sys.exit(0)",
    wants_another: "'allreduce.another': submitted by rank",
}


def fault(comm=None, *, of):
    hvd.init()
    total(torch.ones(2))
    if hvd.rank() == hvd.size() - 1:
        of()
    total(torch.ones(2), "waits")


@pytest.mark.parametrize(
    ("of", "told"), FAULTS.items(), ids=lambda one: getattr(one, "__name__", "")
)
def test_in_a_run_the_cause_is_raised(of, told):
    with pytest.raises(WorkerError) as error:
        run(partial(fault, of=of), world_size=3)
    assert told in str(error.value)


@pytest.mark.parametrize("of", [raises, wants_another], ids=["raises", "wants another"])
def test_over_hosts_each_is_told_the_cause(of):
    hosts = on_hosts(partial(fault, of=of), [1, 1])
    codes = {rank: code for host in hosts for rank, code in host.codes.items()}
    # torchrun ends the others by SIGTERM once one has ended.
    assert set(codes.values()) <= {1, -signal.SIGTERM}, codes
    for host in hosts:
        assert FAULTS[of].removeprefix("raised ") in host.text, host.text


# ---- errors that a program may catch


def goes_on(comm):
    """What ranks do not agree on fails on all of them, and nothing else does."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    different = [
        lambda: total(torch.ones(2 + rank), "shape"),
        lambda: total(torch.ones(2, dtype=torch.float32 if rank else torch.float64), "dtype"),
        lambda: hvd.allreduce(torch.ones(2), name="op", op=hvd.Sum if rank else hvd.Average),
        lambda: hvd.broadcast(torch.ones(2), rank, name="root"),
        lambda: hvd.allgather(torch.ones(2, 1 + rank), name="rows"),
    ]
    for number, operation in enumerate(different):
        beside = hvd.allreduce_async_(torch.ones(2), name=f"beside {number}", op=hvd.Sum)
        with pytest.raises(hvd.HorovodInternalError, match="do not agree") as error:
            operation()
        assert all(f"rank {each} has" in str(error.value) for each in range(size))
        assert hvd.synchronize(beside).tolist() == [size] * 2
    # Operations without a name still meet.
    assert total(torch.ones(2)).tolist() == [size] * 2
    return True


def begins_again(comm):
    """``shutdown``, also with something under way, and ``init`` again."""
    for number in range(3):
        hvd.init()
        hvd.init()
        assert total(torch.ones(1)).item() == hvd.size()
        is_alone = hvd.rank() == number and hvd.size() > 1
        held = hvd.allreduce_async_(torch.ones(1), name="alone") if is_alone else None
        total(torch.ones(1))
        hvd.shutdown()
        hvd.shutdown()
        with pytest.raises(ValueError, match=r"hvd.init\(\)"):
            hvd.rank()
        if held is not None:
            with pytest.raises(PeerLostError):
                hvd.synchronize(held)
    # The run ends with something under way, which all ranks have.
    hvd.init()
    for number in range(50):
        hvd.allreduce_async_(torch.ones(100), name=str(number))
    return True


def many(comm):
    """Hundreds of tensors in orders of their own, and a thread that comes late."""
    hvd.init()
    rank, size, count = hvd.rank(), hvd.size(), 300
    order = range(count) if rank % 2 else reversed(range(count))
    held = {
        n: hvd.allreduce_async_(torch.full((5,), n + rank), name=str(n), op=hvd.Sum) for n in order
    }
    expected = [n * size + sum(range(size)) for n in range(count)]
    assert [hvd.synchronize(held[n])[4].item() for n in range(count)] == expected

    def late():
        time.sleep(0.2 * rank)
        came.append(total(torch.ones(1), "late").item())

    came = []
    thread = threading.Thread(target=late)
    thread.start()
    total(torch.ones(1), "main")
    thread.join()
    assert came == [size]
    return True


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_a_program_can_go_on_after(world_size):
    def all_of_them(comm):
        return (comm.world_size == 1 or goes_on(comm)) and many(comm) and begins_again(comm)

    assert run(all_of_them, world_size=world_size).values == [True] * world_size
