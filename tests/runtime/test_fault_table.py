"""The fault table: what a user can run into, and what must happen then.

A row is a test with its cases. For every row ``faults.Case`` asserts the same: one error in time,
which names the rank, the numbers, the operation and the learner's line; no rank, process, file or
shared memory left; the next run works.
"""

import contextlib
import ctypes
import gc
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from functools import partial
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from faults import PATIENCE, Case, Kernel, check_words
from odd_models import fit_in_turn
from ranks import is_alive, travel_by_value, until_they_wait, wait_until
from test_files import at_most

import labkit
from labkit import DeadlineError, DeadlockError, RunConfig, devices, run
from labkit.collectives import (
    all_gather,
    broadcast,
    fast_ring_all_reduce,
    naive_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
)
from labkit.comm.shared_memory import NUM_SLOTS, SEGMENT_BYTES
from labkit.errors import OutputError
from labkit.runtime import launch
from labkit.training.resolve import make_strategy
from labkit.training.result import largest_difference
from labkit.workload.datasets import load_dataset

travel_by_value(__name__)

TRANSPORTS = ("shared", "gloo")
ALL_REDUCES = (naive_all_reduce, tree_all_reduce, ring_all_reduce, fast_ring_all_reduce)
COLLECTIVES = (fast_ring_all_reduce, ring_all_reduce, tree_all_reduce, broadcast)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    opened = Kernel(tmp_path_factory.mktemp("kernel"))
    yield opened
    opened.close()


@pytest.fixture
def case(tmp_path, capsys):
    run(lambda comm: None, world_size=1)
    # Not pytest's own: what a row undoes are its own changes.
    with pytest.MonkeyPatch.context() as patch:
        case = Case(tmp_path, patch, capsys, Path(__file__).name)
        with case.row():
            yield case


def test_01_raises(case):
    """A rank raises: its rank, its traceback, the learner's line."""

    def raises_on_one(comm):
        if comm.rank == 1:
            {}["the missing key"]
        comm.recv(torch.empty(1), 1)

    def with_a_cause(comm):
        try:
            torch.ones(2) @ torch.ones(3)
        except RuntimeError as error:
            raise ValueError("the shapes") from error

    says = ["rank 1 raised KeyError: 'the missing key'", "Traceback of rank 1:", "raises_on_one"]
    error = case.fails(
        raises_on_one, world_size=3, rank=1, line='{}["the missing key"]', says=says
    )
    assert case.here in error.location
    assert "labkit/runtime/worker.py" not in error.worker_traceback
    says = ["ValueError: the shapes", "inconsistent tensor size"]
    case.fails(with_a_cause, world_size=1, rank=0, line="from error", says=says)


KILLED_IN = {
    "send": lambda comm, x, peer: (comm.send, comm.recv)[comm.rank](x, peer),
    "recv": lambda comm, x, peer: (comm.recv, comm.send)[comm.rank](x, peer),
    "exchange": lambda comm, x, peer: comm.exchange(x, peer, torch.empty_like(x), peer),
    "barrier": lambda comm, x, peer: comm.barrier(),
    "fast ring": lambda comm, x, peer: fast_ring_all_reduce(comm, x),
    "PyTorch's all_reduce": lambda comm, x, peer: torch.distributed.all_reduce(x),
}


def killed_inside(comm, operation):
    """Rank 1 is killed while it is inside the operation, which rank 0 comes to later."""
    if comm.rank == 1:
        threading.Timer(0.15, os.kill, (os.getpid(), signal.SIGKILL)).start()
    else:
        time.sleep(0.4)
    KILLED_IN[operation](comm, torch.ones(NUM_SLOTS * SEGMENT_BYTES), 1 - comm.rank)


class KillsItsReader:
    def __reduce__(self):
        return eval, ("__import__('os').kill(__import__('os').getpid(), 9)",)


def test_02_killed(case):
    """A rank is killed at its start, in a collective, at its end: the signal is named."""

    def while_others_wait(comm):
        if comm.rank == 2:
            time.sleep(60)
        if comm.rank == 1:
            threading.Thread(target=is_killed_in_the_barrier, args=(comm,)).start()
        comm.barrier()

    def is_killed_in_the_barrier(comm):
        until_they_wait(comm, [0, 1])
        os.kill(os.getpid(), signal.SIGKILL)

    def at_the_end(comm):
        if comm.rank == 1:
            subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {os.getpid()}"])
        else:
            time.sleep(1)

    says = ["was killed by SIGKILL before it had started"]
    case.fails(lambda comm, _: None, KillsItsReader(), says=says)
    waited = ["rank 1 was killed by SIGKILL in mid-run", "Rank 0 was waiting for it in barrier at"]
    error = case.fails(while_others_wait, world_size=3, rank=1, line="comm.barrier()", says=waited)
    assert str(error).count("was waiting") == 1, "and not rank 1 for itself"
    says = ["rank 1 was killed by SIGKILL in mid-run", "(the system does that when memory runs"]
    for operation in KILLED_IN:
        for transport in TRANSPORTS:
            case.fails(killed_inside, operation, transport=transport, rank=1, says=says)
    case.fails(at_the_end, rank=1, says=["rank 1 was killed by SIGKILL after its function had"])


def test_03_leaves(case):
    """A rank exits early: which rank, with what code, who waited for it."""

    def leaves_with(comm, code):
        if comm.rank == 1:
            until_they_wait(comm, [0])
            os._exit(code)
        comm.recv(torch.empty(1), 1)

    def calls_exit(comm):
        if comm.rank == 0:
            until_they_wait(comm, [1])
            sys.exit("enough")
        comm.barrier()

    for code in (0, 3):
        says = [f"rank 1 left early with exit code {code}", "Rank 0 was waiting for it in recv at"]
        case.fails(leaves_with, code, rank=1, says=says, line="comm.recv(torch.empty(1), 1)")
    case.fails(lambda comm: os._exit(0), says=["left early with exit code 0"])
    says = ["rank 0 called sys.exit('enough')", "Rank 1 was waiting for it in barrier"]
    case.fails(calls_exit, rank=0, says=says, line='sys.exit("enough")')


def test_04_deadlock(case):
    """Ranks wait for each other, or for one that never comes: the cycle, or the missing rank."""

    def both_receive_first(comm):
        other = torch.empty(2)
        comm.recv(other, (comm.rank + 1) % comm.world_size)
        comm.send(other, (comm.rank - 1) % comm.world_size)

    def both_send_first(comm):
        comm.send(torch.ones(1), 1 - comm.rank)

    def one_returns(comm):
        if comm.rank:
            comm.recv(torch.empty(3), 0)

    def one_skips(comm):
        comm.barrier()
        if comm.rank != 1:
            comm.barrier()

    def slow(comm):
        for _ in range(3):
            time.sleep(0.15 * comm.rank)
            comm.barrier()
        return comm.rank

    def stuck(fn, *says, **options):
        case.fails(fn, says=says, error=DeadlockError, **options)

    for ranks in (2, 3, 4):
        ring = " -> ".join(f"rank {rank % ranks}" for rank in range(ranks + 1))
        waits = "rank 0 is in recv, waiting for rank 1 to send float32 [2]"
        line = "comm.recv(other, (comm.rank + 1) % comm.world_size)"
        next_step = "comm.exchange"
        says = f"deadlock: {ring}", waits, next_step
        stuck(both_receive_first, *says, world_size=ranks, line=line)
    stuck(both_send_first, "is in send, waiting for rank 1 to receive")
    stuck(one_returns, "rank 0 has returned, but rank 1 still waits for it")
    stuck(one_skips, "waiting for rank 1 at barrier number 2", world_size=3)
    assert run(slow, world_size=3).values == [0, 1, 2], "slow ranks are not stuck"


def test_05_hang(case):
    """A hang outside any communication: the run's deadline; each rank's stack."""

    def hangs(comm):
        if comm.rank == 1:
            while True:
                pass
        if comm.rank == 2:
            ctypes.PyDLL(None).sleep(60)  # in C, and holds Python's lock
        comm.recv(torch.empty(1), 1)

    says = ["deadline of 1 s", "rank 0 was in recv", "rank 1 was in its own code"]
    says += ["rank 2 was in its own code", "ctypes.PyDLL(None).sleep(60)", "Next step: look for"]
    line = "comm.recv(torch.empty(1), 1)"
    error = case.fails(hangs, world_size=3, timeout_s=1, says=says, line=line, error=DeadlineError)
    assert isinstance(error, DeadlockError)
    assert str(error).count(case.here) == 3


def misfit(comm, sent, expected, late):
    """Rank 0 sends one tensor and rank 1 expects the other; one of them comes later."""
    if comm.rank == late:
        time.sleep(0.1)
    try:
        if comm.rank == 0:
            comm.send(sent, 1)
        else:
            comm.recv(expected, 0)
    finally:
        # Nothing may have moved.
        print(f"{expected.unique().tolist()}")


def sums_of(comm, tensors, collective):
    collective(comm, tensors[comm.rank])


def shown_name(collective, transport):
    """The fast ring has no other way over gloo than to be the readable one."""
    name = collective.__name__
    return name if transport == "shared" else name.removeprefix("fast_")


def test_06_shapes(case):
    """Shapes differ between ranks: before the transfer: both shapes."""
    for transport in TRANSPORTS:
        for late in (0, 1):
            sent, expected = torch.ones(3), torch.zeros(2, 2)
            says = ["rank 0 sends float32 [3], at", "rank 1 receives into float32 [2, 2], at"]
            says += ["comm.send(sent, 1)", "comm.recv(expected, 0)"]
            options = {"transport": transport, "error": DeadlockError}
            case.fails(misfit, sent, expected, late, says=says, line="comm.send", **options)
            assert "[1.0]" not in case.capsys.readouterr().out
        for collective in COLLECTIVES:
            # As many elements on both: only their shapes tell.
            tensors, name = [torch.ones(4), torch.ones(2, 2)], shown_name(collective, transport)
            says = ["call different collectives", f"rank 0: 1. {name} float32 [4]"]
            says += [f"rank 1: 1. {name} float32 [2, 2]"]
            error = case.fails(sums_of, tensors, collective, says=says, **options)
            assert "collective(comm, tensors[comm.rank])" in error.location


def test_07_dtypes(case):
    """Dtypes differ, of one size or of two: before the transfer: both; never garbage."""
    for transport in TRANSPORTS:
        for other in (torch.float64, torch.int32):
            name = str(other).removeprefix("torch.")
            sent, expected = torch.ones(3), torch.zeros(3, dtype=other)
            options = {"transport": transport, "error": DeadlockError}
            says = ["rank 0 sends float32 [3], at", f"rank 1 receives into {name} [3], at"]
            case.fails(misfit, sent, expected, 1, says=says, line="comm.recv", **options)
            assert "[1" not in case.capsys.readouterr().out
            says = ["rank 0: 1. tree_all_reduce float32 [3] sum"]
            says += [f"rank 1: 1. tree_all_reduce {name} [3] sum"]
            case.fails(sums_of, [sent, expected], tree_all_reduce, says=says, **options)


def test_08_order(case):
    """Collectives in another order; one call more on a rank: both sequences where they part."""

    def another_order(comm):
        comm.barrier()
        calls = [broadcast, ring_all_reduce]
        for call in calls if comm.rank == 0 else reversed(calls):
            call(comm, torch.ones(2))

    def one_more(comm, collective):
        for _ in range(5 + (comm.rank == 1)):
            collective(comm, torch.ones(2))

    for transport in TRANSPORTS:
        options = {"transport": transport, "error": DeadlockError}
        says = ["call different collectives", "the same order"]
        says += ["rank 0: 1. barrier, 2. broadcast float32 [2] from rank 0"]
        says += [": 1. barrier, 2. ring_all_reduce float32 [2] sum"]
        case.fails(another_order, world_size=3, says=says, **options)
        for collective in COLLECTIVES:
            call = f"{shown_name(collective, transport)} float32 [2]"
            says = ["has returned, but rank 1 still", f"~  rank 1: ..., .*6. {re.escape(call)}"]
            says += [f"~  rank 0: ..., .*5. {re.escape(call)}"]
            line = "collective(comm, torch.ones(2))"
            error = case.fails(one_more, collective, says=says, line=line, **options)
            less = next(one for one in str(error).splitlines() if one.startswith("  rank 0: ..."))
            assert "6." not in less


def test_09_uneven(case):
    """Uneven batches, a last partial one, fewer samples than ranks: right, or a clear refusal."""
    # 107 = 3 x 35 + 2: batches that do not divide, and a last one of fewer samples than ranks.
    settings = {"epochs": 1, "train_size": 107, "batch_size": 35, "lr": 0.02, "dtype": "float64"}
    settings |= {"model": "mlp"}

    def jobs(world_size, *techniques):
        configs = (RunConfig(name, world_size=world_size, **settings) for name in techniques)
        return {config.strategy: (config, make_strategy(config)) for config in configs}

    with case.timed():
        (alone,) = run(fit_in_turn, jobs(1, "single"), world_size=1).values
        shared = jobs(3, "ddp", "ring_all_reduce", "parameter_server")
        first, *others = run(fit_in_turn, shared, world_size=3).values
    for name, report in first.items():
        assert largest_difference(report.state, alone["single"].state) < 1e-10, name
        assert {other[name].checksum for other in others} == {report.checksum}
    few = settings | {"batch_size": 3}
    case.refused(
        lambda: labkit.train_with("ddp", world_size=4, **few), "batch_size 3", "4", "smaller"
    )


def test_10_sizes(case):
    """A tensor that is empty, a scalar, shorter than the ranks, not divisible: right result."""
    shapes = ((0,), (), (1,), (2,), (7,), (3, 0), (2, 5))

    def sums(comm):
        found = []
        for shape in shapes:
            mine = torch.arange(max(1, torch.Size(shape).numel())).double()
            mine = mine[: torch.Size(shape).numel()].reshape(shape) + comm.rank
            reduced = [all_reduce(comm, mine.clone()) for all_reduce in ALL_REDUCES]
            found.append([*reduced, broadcast(comm, mine.clone(), 2), *all_gather(comm, mine)])
        return found

    for transport in TRANSPORTS:
        with case.timed():
            for found in run(sums, world_size=3, transport=transport).values:
                for shape, (*reduced, sent, first, second, third) in zip(shapes, found):
                    assert {value.shape for value in (*reduced, sent, first)} == {shape}
                    for value in reduced:
                        assert torch.equal(value, first + second + third), shape
                    assert torch.equal(sent, first + 2), shape


def reduced_views(comm, all_reduce):
    """Tensors of which this rank has reduced a view, in place."""
    matrix = torch.full((3, 4), comm.rank + 1.0)
    every_second, scalar = torch.full((6,), comm.rank + 1), torch.tensor(comm.rank + 1)
    leaf = torch.full((2,), comm.rank + 1.0, requires_grad=True)
    conjugate = torch.full((2,), complex(comm.rank + 1, comm.rank + 1))
    # Strided, and larger than a segment of shared memory.
    large = torch.full((150_000, 2), comm.rank + 1.0)
    views = [matrix.t()[1:], every_second[::2], scalar, leaf, conjugate.conj(), matrix[:0]]
    for view in (*views, large[:, 1]):
        assert all_reduce(comm, view) is view
    assert (leaf.is_leaf, leaf.requires_grad, leaf.grad) == (True, True, None)
    hidden = all_reduce(comm, 2 * leaf).detach()
    edges = large.unique(dim=0)
    return matrix, every_second, scalar, leaf.detach(), hidden, conjugate, edges


def test_11_views(case):
    """A view, an expanded tensor, a leaf with a gradient: right in place, or a clear refusal."""

    def in_place(comm):
        return [reduced_views(comm, all_reduce) for all_reduce in ALL_REDUCES]

    def expanded(comm, all_reduce):
        all_reduce(comm, torch.ones(1).expand(3))

    for transport in TRANSPORTS:
        with case.timed():
            by_rank = run(in_place, world_size=3, transport=transport).values
        for mine, found in enumerate(by_rank, start=1):
            for matrix, every_second, scalar, leaf, hidden, conjugate, edges in found:
                assert matrix.tolist() == [[mine, 6, 6, 6]] * 3
                assert every_second.tolist() == [6, mine] * 3
                # The leaf was reduced before the tensor of its graph was made.
                assert (scalar.item(), leaf.tolist(), hidden.tolist()) == (6, [6, 6], [36, 36])
                assert conjugate.tolist() == [complex(6, 6)] * 2
                assert edges.tolist() == [[mine, 6]]
    for all_reduce in ALL_REDUCES:
        says = ["ValueError", "expanded tensor: its elements share memory"]
        case.fails(expanded, all_reduce, says=says, line="expand(3)")


def test_12_not_numbers(case):
    """NaN, overflow of float16, wrap of uint8: as in PyTorch; checks flag it."""

    def oddities(comm):
        found = []
        for all_reduce in ALL_REDUCES:
            nan = torch.tensor([float("nan") if comm.rank == 1 else 1.0, 1.0])
            operations = ("sum", "mean", "max", "min", "product")
            found.append([all_reduce(comm, nan.clone(), op).isnan().tolist() for op in operations])
            half = all_reduce(comm, torch.tensor([60000.0], dtype=torch.float16))
            byte = all_reduce(comm, torch.tensor([100], dtype=torch.uint8))
            assert (half.tolist(), byte.tolist()) == ([float("inf")], [300 % 256])
        return found

    for transport in TRANSPORTS:
        with case.timed():
            for found in run(oddities, world_size=3, transport=transport).values:
                assert found == [[[True, False]] * 5] * len(ALL_REDUCES)
    answers = _of_the_course("workbook.exercises.grader").answers
    with case.timed():
        asked = [((torch.ones(1),), torch.ones(1))]
        assert answers(lambda x: x / 0 * 0, asked, name="none", signature="x") is not None


def test_13_refusals(case):
    """An integer mean, bits of a float, sparse, a foreign device: the same error on every rank."""
    faults = {
        "cannot take the mean of int32 over ranks": lambda f, comm, x: f(comm, x.int(), "mean"),
        "cannot take the max of complex64": lambda f, comm, x: f(comm, x * 1j, "max"),
        "cannot take the band of float32": lambda f, comm, x: f(comm, x, "band"),
        "use .to_dense()": lambda f, comm, x: f(comm, x.to_sparse()),
        "move it with .to(comm.device)": lambda f, comm, x: f(comm, x.to("meta")),
        "a tensor is needed": lambda f, comm, x: f(comm, x.tolist()),
    }

    def each(comm):
        texts = {}
        for words, call in faults.items():
            for all_reduce in ALL_REDUCES:
                with contextlib.suppress(ValueError):
                    call(all_reduce, comm, torch.ones(3))
                    texts[words] = "not refused"
                try:
                    call(all_reduce, comm, torch.ones(3))
                except ValueError as error:
                    texts[words, all_reduce.__name__] = str(error)
        assert (comm.messages, comm.operations) == (0, 0)
        return texts, ring_all_reduce(comm, torch.ones(3)).tolist()

    for transport in TRANSPORTS:
        with case.timed():
            found, totals = zip(*run(each, world_size=3, transport=transport).values)
            assert totals == ([3.0] * 3,) * 3, "the next collective works"
            assert len(found[0]) == len(faults) * len(ALL_REDUCES)
            assert found[0] == found[1] == found[2]
            for (words, _), text in found[0].items():
                assert words in text


def test_14_lifetime(case):
    """Initialised twice, used before, used after the end: ValueError that says so."""

    def again(comm):
        torch.distributed.init_process_group("gloo")

    def after(comm):
        torch.kept = comm

        class Late:
            def __reduce__(self):
                comm.session.close()
                comm.barrier()

        return Late()

    case.fails(again, world_size=1, says=["ValueError: trying to initialize"], line="init_process")
    case.fails(after, world_size=1, says=["used after the end of its run", "labkit.run"])
    case.fails(lambda comm: {"comm": comm}, world_size=1, says=["a comm belongs to its rank"])
    tensor = torch.ones(1)
    case.refused(lambda: torch.distributed.all_reduce(tensor), "has not been initialized")


def test_15_ports(case):
    """The port is taken: another. The host cannot be reached: its address and the seconds."""
    with socket.socket() as one, socket.socket() as other, case.timed():
        for taken, port in ((one, 29500), (other, 12355)):
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):  # taken by another program already
                taken.bind(("127.0.0.1", port))
                taken.listen()
        assert run(lambda comm: comm.rank, world_size=2).values == [0, 1]
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        port = str(nobody.getsockname()[1])
        names = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "x"}
        for name, value in names.items():
            case.patch.setenv(name, value)
        says = [f"rank 1 could not join the others at 127.0.0.1:{port}", r"~ in \d+ s: check that"]
        call = lambda: run(lambda comm: 1, world_size=2, timeout_s=2)  # noqa: E731
        case.refused(call, *says, error=ConnectionError)
    case.patch.undo()


def test_16_world_sizes(case):
    """A world size of 0, negative, no integer: ValueError; far above the cores: a warning."""
    for wrong in (0, -1, 2.5, "2", None, True, 10**9):
        says = f"world_size must be (an integer from 1 up|at most 4,096), got {wrong!r}"
        case.refused(lambda: run(print, world_size=wrong), f"~{says}")  # noqa: B023

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    case.patch.setattr(devices, "num_cores", lambda: 1)
    case.patch.setattr(launch, "dump_call", stop)
    with (
        pytest.warns(UserWarning, match="world_size 5 is far above this machine's 1 core:"),
        contextlib.suppress(KeyboardInterrupt),
    ):
        run(print, world_size=5)
    case.patch.undo()


@pytest.mark.fresh
def test_17_stopped(case, kernel):
    """The stop button in mid-run: KeyboardInterrupt; ranks gone; run again at once."""
    folder = str(case.folder)

    def sleeps(comm):
        Path(folder, f"{comm.rank} sleeps").touch()
        time.sleep(60)

    def stop():
        assert wait_until(lambda: len(os.listdir(folder)) == 2, 30)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Thread(target=stop)
    timer.start()
    case.fails(sleeps, error=KeyboardInterrupt)
    timer.join()

    # A terminal and Jupyter signal every process of the group, the starting server among them.
    kernel.send(
        "labkit.run(lambda comm: __import__('time').sleep(60), device='cpu', world_size=2)"
    )
    assert wait_until(lambda: len(kernel.session) >= 3, 30)
    with case.timed():
        kernel.interrupt()
        assert kernel.printed() == "KeyboardInterrupt\n"
    again = "print(labkit.run(lambda comm: comm.rank, world_size=2, device='cpu').values)"
    assert kernel.runs(again) == "[0, 1]\n"


@pytest.mark.fresh
def test_18_kernel_killed(case):
    """The kernel is killed or restarted in mid-run: no rank left after 2 s."""
    # The path of a socket in it must be short.
    folder = Path(tempfile.mkdtemp(dir=os.environ["TESTS_TMPDIR"]))
    kernel = Kernel(folder)
    kernel.send(
        """
        def works(comm):
            print(os.getpid(), flush=True)
            while True:
                comm.barrier()

        labkit.run(works, world_size=2, device="cpu")
        """
    )
    ranks = [int(kernel.line().split()[-1]) for _ in range(2)]
    with case.timed():
        kernel.kill()
        assert wait_until(lambda: not any(map(is_alive, ranks)), 2 * PATIENCE)
    # The forkserver may take longer.
    assert wait_until(lambda: not kernel.session, 20)
    kernel.close()


def test_19_nested(case):
    """From a widget's callback or a thread, two at once: works. A run in a run: refused."""

    def neighbour(comm, offset):
        mine, theirs = torch.tensor([comm.rank + offset + 0.0]), torch.empty(1)
        comm.exchange(mine, 1 - comm.rank, theirs, 1 - comm.rank)
        return theirs.item()

    found = {}

    def start(offset):
        found[offset] = run(neighbour, offset, world_size=2).values

    with case.timed():
        threads = [threading.Thread(target=start, args=(offset,)) for offset in (10, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == {10: [11, 10], 20: [21, 20]}

    def inside(comm):
        return run(neighbour, 0, world_size=2).values

    says = ["ValueError: labkit.run was called inside a rank of another run", "start runs from"]
    case.fails(inside, world_size=1, rank=0, says=says, line="run(neighbour, 0")
    _of_the_course("workbook.widgets")
    import ipywidgets

    button = ipywidgets.Button()
    button.on_click(lambda _: start(30))
    with case.timed():
        button.click()
    button.close()
    assert found[30] == [31, 30]


def test_20_pickling(case):
    """A closure or a result that cannot be pickled; one of 100 MB: names the object; works."""
    lock = threading.Lock()
    case.refused(
        lambda: run(lambda comm: lock, world_size=2), "it uses lock (_thread.lock)", "inside the"
    )
    case.refused(
        lambda: run(print, {"lock": lock}, world_size=2), "args[0]['lock'] (_thread.lock)"
    )
    case.refused(lambda: run(3, world_size=1), "fn must be a function of a comm, got int")

    def locks(comm):
        return {"fine": 1, "locks": [threading.Lock()]}

    says = ["rank 0 raised UnpicklableError: the result cannot be sent back"]
    says += ["value['locks'][0] (_thread.lock)", "Return tensors, numbers"]
    case.fails(locks, world_size=1, rank=0, says=says)
    with case.timed():
        values = run(lambda comm: torch.full((25_000_000,), 2.0), world_size=1).values
    assert values[0].sum().item() == 50_000_000


def test_21_printing(case):
    """A rank prints a lot, or binary; all print at once: by rank, in order, cut with a count."""

    def prints(comm):
        for number in range(3):
            print("line", number)
            comm.barrier()
        if comm.rank == 0:
            os.write(1, b"bin \xff\x00\n")
            print("to stderr", file=sys.stderr)
            os.system("echo from a child")
        else:
            for _ in range(30):
                print("x" * 10_000)
        sys.stdout.write("no newline at the end")

    case.capsys.readouterr()
    # What is shown while the ranks run is by rank too, but a rank that is late is not waited for.
    case.patch.setenv("LABKIT_LIVE", "0")
    with case.timed():
        run(prints, world_size=2)
    lines = case.capsys.readouterr().out.splitlines()
    first = [*(f"line {number}" for number in range(3)), "bin \\xff\x00", "to stderr"]
    first += ["from a child", "no newline at the end"]
    assert lines[:7] == [f"[rank 0] {line}" for line in first]
    assert lines[7:10] == [f"[rank 1] line {number}" for number in range(3)]
    assert {line[:9] for line in lines[7:]} == {"[rank 1] "}
    assert sum(map(len, lines)) < 210_000
    assert re.search(r"\[rank 1\] \.\.\. 100,\d+ more characters cut \(a rank may", lines[-1])
    case.patch.undo()


@pytest.mark.fresh
def test_22_gpus_asked_for(case, kernel):
    """CUDA where there is none; more ranks than GPUs: the choice and its consequence, one line."""
    case.patch.setattr(devices, "num_gpus", lambda: 0)
    for device in ({"device": "cuda"}, {"devices": "cuda:0"}):
        text = case.refused(lambda: run(print, world_size=1, **device), "CUDA GPU")  # noqa: B023
        assert "\n" not in text
    case.patch.undo()
    with case.timed():
        printed = kernel.runs(
            """
            def where(comm):
                return str(comm.device)

            print(labkit.run(where, world_size=2).values)
            """
        )
    said, values = printed.splitlines()
    assert said.startswith("2 ranks share 1 GPU: they talk over gloo through host memory")
    assert "times are not those of more GPUs" in said
    assert values == "['cuda:0', 'cuda:0']"


@pytest.mark.fresh
def test_23_cuda_initialised(case, kernel):
    """CUDA is initialised in the kernel: still works: never a fork after CUDA."""

    def look(comm):
        mark = getattr(torch, "labkit_test_mark", None)
        shared = gc.get_freeze_count() > 100_000
        cuda = torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()
        return os.getpid(), mark, *cuda, shared, gc.isenabled()

    # Ranks share nothing with the caller but the modules that their server has loaded.
    case.patch.setattr(torch, "labkit_test_mark", "parent", raising=False)
    with case.timed():
        values = run(look, world_size=2).values
    assert len({pid for pid, *_ in values} | {os.getpid()}) == 3
    assert [rest for _, *rest in values] == [[None, False, False, True, True]] * 2
    assert not torch.cuda.is_initialized()
    with case.timed():
        printed = kernel.runs(
            """
            total = torch.ones(3, device="cuda").sum()

            def fresh(comm):
                began = torch.cuda.is_initialized()
                x = torch.ones(2, device=comm.device)
                labkit.collectives.ring_all_reduce(comm, x)
                return began, x.tolist(), torch.cuda._is_in_bad_fork()

            print(torch.cuda.is_initialized(), labkit.run(fresh, world_size=2).values)
            print(labkit.run(fresh, world_size=2, device="cpu").values)
            """
        )
    # Before its function begins, labkit sets a rank's GPU.
    on_gpu, on_cpu = ([(began, [2.0, 2.0], False)] * 2 for began in (True, False))
    assert printed.splitlines()[-2:] == [f"True {on_gpu}", f"{on_cpu}"]


@pytest.mark.fresh
def test_24_shared_memory_full(case, kernel):
    """/dev/shm too small or full: runs need none; else the size needed, there, the way round."""
    if not kernel.has_disks:
        pytest.skip("this user may not mount a file system of their own")
    cell = """
        def sums(comm):
            return labkit.collectives.fast_ring_all_reduce(comm, torch.ones(10**6)).mean().item()

        for command in ("true", "dd if=/dev/zero of=/dev/shm/old bs=1k count=4 status=none",
                        "mount -o remount,ro /dev/shm", "mount -o remount,rw /dev/shm"):
            os.system(command)
            print(labkit.run(sums, world_size=2, device="cpu").values, os.listdir("/dev/shm"))
        """
    with case.timed():
        lines = kernel.runs(cell).splitlines()
    assert lines == ["[2.0, 2.0] []", *["[2.0, 2.0] ['old']"] * 3]
    # What does not fit: a queue's semaphores, and then the batches.
    for number, size in enumerate(("4k", "512k")):
        cell = f"""
            from torch.utils.data import DataLoader, TensorDataset

            def loads(comm):
                data = TensorDataset(torch.zeros(64, 10_000))
                return sum(len(batch) for batch, in DataLoader(data, batch_size=16, num_workers=2))

            os.system("mount -o remount,size={size} /dev/shm")
            labkit.run(loads, world_size=2, device="cpu")
            """
        with case.timed():
            printed = kernel.runs(cell)
        says = ["~WorkerError: rank [01] raised ", "The DataLoader's 2 workers keep up to"]
        says += [
            "2.44 MiB on each rank",
            f"of {('4 KiB', '512 KiB')[number]} free",
            "Next step: a",
        ]
        check_words(printed, [*says, "num_workers=0", "--shm-size", "in DataLoader(data"])
    left = kernel.runs("os.remove('/dev/shm/old'); print(*os.listdir('/dev/shm'))").split()
    # A rank that is killed while the C library makes a semaphore leaves that one's temporary name.
    assert [name for name in left if not re.fullmatch(r"sem\.\w{6}", name)] == []


def bounded(comm, how, limit):
    """Rank 1 may have 256 MiB more than it has."""
    if comm.rank == 0:
        comm.barrier()
    pages = int(Path("/proc/self/statm").read_text().split()[0 if limit == "AS" else 5])
    most = pages * resource.getpagesize() + 2**28
    resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (most, most))
    if how == "a tensor":
        torch.empty(2**30, dtype=torch.uint8)
    elif how == "an object":
        bytearray(2**30)
    elif how == "a result":
        return bytearray(2**27)
    return None


def test_25_out_of_memory(case):
    """A rank out of memory: rank, request, what it held."""
    for limit in ("AS", "DATA"):
        says = ["1073741824 bytes", "the rank held up to"]
        next_step = "Next step: "
        line = "torch.empty(2**30"
        case.fails(bounded, "a tensor", limit, rank=1, says=[*says, next_step], line=line)
        line = "bytearray(2**30)"
        case.fails(bounded, "an object", limit, rank=1, says=[*says[1:], next_step], line=line)
    says = ["model or result", *says[1:]]
    case.fails(bounded, "a result", "AS", rank=1, says=says)
    killed = ["rank 1 was killed by SIGKILL in mid-run (the system does that when memory runs out"]
    case.fails(killed_inside, "recv", rank=1, says=killed)


def test_26_data(case):
    """Data missing, truncated, offline: which file, how to get it."""

    def offline(request, *args, **kwargs):
        raise URLError("Temporary failure in name resolution")

    folder = case.folder / "digits"
    shutil.copytree(Path(__file__).parents[2] / "data" / "digits", folder)
    images = folder / "train-images-idx3-ubyte"
    images.write_bytes(images.read_bytes()[:5000])
    restore = "git checkout -- data/digits"
    says = str(images), "5000 bytes", restore
    case.refused(lambda: load_dataset("digits", root=folder), *says)
    images.unlink()
    says = f"{images} is missing", restore
    case.refused(lambda: load_dataset("digits", root=folder), *says, error=FileNotFoundError)
    empty = case.folder / "empty"
    empty.mkdir()
    says = "mnist is not in", str(empty), "--download", 'load_dataset("mnist", download=True)'
    case.refused(lambda: load_dataset("mnist", root=empty), *says, error=FileNotFoundError)
    case.patch.setattr(urllib.request, "urlopen", offline)
    call = lambda: load_dataset("mnist", root=empty, download=True)  # noqa: E731
    says = str(empty), "Temporary failure in name resolution", "Check the network"
    case.refused(call, *says)
    assert list(empty.iterdir()) == []
    case.patch.undo()


def test_27_checkpoints(case):
    """A checkpoint truncated, of another model or world size: what differs; files untouched."""
    folder = case.folder / "run"
    settings = {"train_size": 64, "batch_size": 16, "model": "mlp", "checkpoint_dir": str(folder)}

    def train(strategy="ddp", **options):
        return labkit.train_with(strategy, **settings | {"world_size": 2} | options)

    def refused(*says, **options):
        whole = contents(folder)
        case.refused(lambda: train(epochs=2, resume=True, **options), *says)
        assert contents(folder) == whole, "a file has changed"

    train(epochs=1, checkpoint_every=2)
    older, newer = sorted(folder.glob("step-*"))
    says = f"cannot continue from {newer}", "model mlp there, small_cnn here", "1.weight [64, 64]"
    refused(*says, "Next step: resume with the settings there", model="small_cnn")
    (part,) = newer.glob("rank0.safetensors")
    whole = part.read_bytes()
    part.write_bytes(whole[:-10])
    told = f"{part.name} has {len(whole) - 10} bytes, {len(whole)} were written to a file"
    damaged = contents(newer)
    with case.timed():
        # On another number of ranks: what is left continues where one device would.
        result = train(epochs=2, resume=True, world_size=1)
    assert f"skipped {newer.name}: {told}; continues from {older.name}" in result.notes["note"]
    kept = contents(folder)
    assert set(damaged.values()) <= set(kept.values()), "what is damaged is kept"
    once = labkit.train_with("single", **settings | {"epochs": 2, "checkpoint_dir": None})
    assert largest_difference(result.state, once.state) < 1e-5
    for path in folder.glob("step-*/rank0.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    refused(f"no checkpoint in {folder} is whole", "has 100 bytes, ", "They are as they were")


def contents(folder):
    """The bytes of all files, by name."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.fresh
def test_28_disk_full(case, kernel):
    """The disk is full while a result is written: the old file is intact."""
    plots, progress = _of_the_course("workbook.plots"), _of_the_course("workbook.notebook.record")
    result = labkit.train_with("single", train_size=64, epochs=1)
    writers = {"result.json": result.save_json, "weights": result.save_state}
    writers |= {"trace.json": result.trace.save, "figure.png": plots.timeline(result.trace).save}
    for name, write in writers.items():
        (path := case.folder / name).write_text("old")
        with at_most(10):
            says = f"cannot write {path}: File too large"
            case.refused(lambda: write(path), says, error=OutputError)  # noqa: B023
        assert path.read_text() == "old"
    assert {path.name for path in case.folder.iterdir()} == set(writers)
    progress.note_verdict("first", "passed", True)
    with at_most(20), case.timed():
        progress.note_verdict("second", "passed", True)
    assert "progress is not kept" in case.capsys.readouterr().err
    assert set(progress.read().exercises[""]) == {"first", "second"}
    if kernel.has_disks:
        a_real_disk_full(case, kernel)
        full_at_a_checkpoint(case, kernel)


def a_real_disk_full(case, kernel):
    """The command: every file that can be written is written, and the exit status is 1."""
    disk = kernel.disk
    cell = f"""
        from labkit.__main__ import main
        open("{disk}/weights", "w").write("old")
        words = "--strategy single --train-size 64 --device cpu --save {disk}/weights"
        print(main(["train", *words.split(), "--json", "{disk}/a.json"]))
        print(open("{disk}/weights").read(), sorted(os.listdir("{disk}")))
        """
    with case.timed():
        printed = kernel.runs(cell)
    assert f"labkit: cannot write {disk}/weights: No space left on device\n" in printed
    assert "replicas agree: True" in printed
    assert printed.endswith("1\nold ['a.json', 'weights']\n")


def full_at_a_checkpoint(case, kernel):
    """The older checkpoint stays whole; the error says which one is missing, and what it needs."""
    disk = kernel.disk
    cell = f"""
        from labkit.training.checkpoint import newest

        def train(epochs, **options):
            return labkit.train_with("ddp", world_size=2, device="cpu", model="mlp", epochs=epochs,
                train_size=64, checkpoint_dir="{disk}/run", **options)

        def resize(kilobytes):
            os.system(f"mount -o remount,size={{kilobytes}}k {disk}")

        resize(4000)
        train(1)
        before = newest("{disk}/run")[0].path
        used = os.statvfs("{disk}")
        resize((used.f_blocks - used.f_bfree) * used.f_frsize // 1024 + 40)
        try:
            train(2, resume=True, log_dir="{disk}/logs")
        except labkit.WorkerError as error:
            print(error)
        print(newest("{disk}/run")[0].path == before, sorted(os.listdir("{disk}/run")))
        resize(4000)
        print(len(train(2, resume=True).epochs))
        """
    with case.timed():
        printed = kernel.runs(cell)
    says = [
        "~rank [01] raised OutputError: cannot write a checkpoint to .*No space left on device"
    ]
    check_words(printed, says)
    *_, unchanged, _, epochs = printed.splitlines()
    assert unchanged.startswith("True ['step-00000001']")
    assert epochs == "2"


def test_29_progress_damaged(case):
    """The progress file is damaged: said once, set aside, the course goes on."""
    record = _of_the_course("workbook.notebook.record")
    path = case.folder / "data" / "progress.json"
    path.parent.mkdir()
    case.patch.setenv("LABKIT_PROGRESS", str(path))
    for number, content in enumerate((b'{"version": 1, "exer', b"\xff\x00", b"[7]"), start=1):
        path.write_bytes(content)
        case.patch.setattr(record, "_pending", {})
        with case.timed():
            assert record.read().exercises == {}
            record.note_verdict("ring", "passed", True)
        assert set(record.read().exercises[""]) == {"ring"}
        kept = list(path.parent.glob("progress.damaged-*.json"))
        assert len(kept) == number
        assert content in {one.read_bytes() for one in kept}
        (said,) = case.capsys.readouterr().err.splitlines()
        check_words(said, [f"{path} is damaged (", "a new one is begun"])
    case.patch.undo()


def test_30_sliders(case):
    """A slider moved while busy; a split at the ends: the last value applies; a limited range."""
    widgets = _of_the_course("workbook.widgets")
    plots = _of_the_course("workbook.plots")
    import ipywidgets
    from matplotlib.figure import Figure
    from splits import LINK, PROFILE

    from workbook.widgets.explorer import Explorer

    begun, later = threading.Event(), threading.Event()

    def draw(size):
        if size == 1:
            begun.set()
            later.wait(0.3)
        return plots.CaptionedFigure(
            Figure(), alt=f"a figure of size {size}", caption="Empty axes."
        )

    size = ipywidgets.IntSlider(0, 0, 5)
    explorer = Explorer(draw, size=size)
    slow = threading.Thread(target=setattr, args=(size, "value", 1))
    with case.timed():
        slow.start()
        begun.wait()
        for value in (3, 5, 2):
            size.value = value
        later.set()
        slow.join()
    assert 'alt="a figure of size 2"' in explorer.view.value
    explorer.close()
    splits = widgets.split_explorer(PROFILE, LINK, split_points=(2,))
    for point in (0, 6, 99):
        says = f"split point {point} leaves a stage without layers"
        case.refused(partial(setattr, splits, "points", [point]), says)
    assert splits.points == [2]
    splits.close()
    assert wait_until(lambda: threading.active_count() < 10, 5)


def _of_the_course(name):
    """A room of the course; the core can be had without it, and so can its rows."""
    return pytest.importorskip(name, exc_type=ModuleNotFoundError)
