"""The fault table: what a user can run into, and what must happen then.

FAULTS has the rows in which a run must fail: what its ranks do, on which transport, and the words
of its one error. The other rows are tests. At the end of every row (``faults.Case``) no rank,
process, file or shared memory is left, and the next run works.
"""

import contextlib
import ctypes
import itertools
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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
from faults import Case, Fault, Kernel, check_words
from ranks import is_alive, until_they_wait, wait_until
from test_files import at_most

import labkit
from labkit import DeadlineError, DeadlockError, run
from labkit.collectives import (
    broadcast,
    direct_all_reduce,
    fast_ring_all_reduce,
    naive_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
)
from labkit.engine import devices
from labkit.engine.comm.shared_memory import NUM_SLOTS, SEGMENT_BYTES
from labkit.engine.runtime import launch
from labkit.workload.datasets import PACKAGE_DATA, load_dataset

TRANSPORTS = ("shared", "gloo")
ALL_REDUCES = (
    naive_all_reduce,
    tree_all_reduce,
    ring_all_reduce,
    fast_ring_all_reduce,
    direct_all_reduce,
)
COLLECTIVES = (
    direct_all_reduce,
    fast_ring_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
    broadcast,
)
COLLECTIVES_ON = list(itertools.product(COLLECTIVES, TRANSPORTS))
HERE = Path(__file__).name


# What ranks do


def raises_on_one(comm):
    if comm.rank == 1:
        {}["the missing key"]
    comm.recv(torch.empty(1), 1)


class Unreadable(RuntimeError):
    __str__ = None


def raises_unreadable(comm):
    raise Unreadable


def raises_with_a_cause(comm):
    try:
        torch.ones(2) @ torch.ones(3)
    except RuntimeError as error:
        raise ValueError("the shapes") from error


class KillsItsReader:
    def __reduce__(self):
        return eval, ("__import__('os').kill(__import__('os').getpid(), 9)",)


class KillsItsWriter:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


OPERATIONS = {
    "send": lambda comm, x, peer: (comm.send, comm.recv)[comm.rank](x, peer),
    "recv": lambda comm, x, peer: (comm.recv, comm.send)[comm.rank](x, peer),
    "exchange": lambda comm, x, peer: comm.exchange(x, peer, torch.empty_like(x), peer),
    "barrier": lambda comm, x, peer: comm.barrier(),
    "fast ring": lambda comm, x, peer: fast_ring_all_reduce(comm, x),
    "direct": lambda comm, x, peer: direct_all_reduce(comm, x),
}


def killed_inside(comm, operation):
    """Rank 1 is killed while it is inside the operation, to which rank 0 comes later."""

    def strike():
        until_they_wait(comm, [1])
        os.kill(os.getpid(), signal.SIGKILL)

    process = torch.tensor([os.getpid()])
    broadcast(comm, process, 1)
    if comm.rank == 1:
        threading.Thread(target=strike).start()
    else:
        wait_until(lambda: not is_alive(process.item()), 30)
    OPERATIONS[operation](comm, torch.ones(NUM_SLOTS * SEGMENT_BYTES), 1 - comm.rank)


def killed_while_another_waits(comm):
    if comm.rank == 1:
        until_they_wait(comm, [0])
        os.kill(os.getpid(), signal.SIGKILL)
    if comm.rank == 2:
        time.sleep(60)
    comm.barrier()


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


def all_receive_first(comm):
    other = torch.empty(2)
    comm.recv(other, (comm.rank + 1) % comm.world_size)
    comm.send(other, (comm.rank - 1) % comm.world_size)


def one_returns(comm):
    if comm.rank:
        comm.recv(torch.empty(3), 0)


def one_skips(comm):
    comm.barrier()
    if comm.rank != 1:
        comm.barrier()


def hangs(comm):
    if comm.rank == 1:
        while True:
            pass
    if comm.rank == 2:
        ctypes.PyDLL(None).sleep(60)  # in C, and holds Python's lock
    comm.recv(torch.empty(1), 1)


def misfit(comm, tensors, late):
    """Rank 0 sends its tensor and rank 1 expects another; one of them comes later."""
    mine = tensors[comm.rank]
    if comm.rank == late:
        until_they_wait(comm, [1 - late])
    try:
        (comm.send, comm.recv)[comm.rank](mine, 1 - comm.rank)
    finally:
        assert comm.rank == 0 or not mine.any(), "something has moved"


def sums_of(comm, tensors, collective):
    collective(comm, tensors[comm.rank])


def in_another_order(comm):
    comm.barrier()
    calls = [broadcast, ring_all_reduce]
    for call in calls if comm.rank == 0 else reversed(calls):
        call(comm, torch.ones(2))


def one_call_more(comm, collective):
    for _ in range(5 + (comm.rank == 1)):
        collective(comm, torch.ones(2))


def communicates_after_the_end(comm):
    class Late:
        def __reduce__(self):
            comm.session.close()
            comm.barrier()

    return Late()


def takes_too_much(comm, what, limit="AS"):
    """Rank 1 may have 256 MiB more than it has."""
    if comm.rank == 0:
        comm.barrier()
    pages = int(Path("/proc/self/statm").read_text().split()[0 if limit == "AS" else 5])
    most = pages * resource.getpagesize() + 2**28
    resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (most, most))
    if what == "a tensor":
        torch.empty(2**30, dtype=torch.uint8)
    elif what == "an object":
        bytearray(2**30)
    return bytearray(2**27)


# The rows in which a run must fail


def shown_name(collective, transport):
    """Over gloo the fast ring and the direct all-reduce are the readable ring."""
    name = collective.__name__
    return name if transport == "shared" else re.sub("^(fast_ring|direct)", "ring", name)


def differ(collective, transport, tensors, *shown):
    """Ranks that call a collective on two tensors; how the error shows these."""
    name = shown_name(collective, transport)
    says = ["call different collectives", HERE, "collective(comm, tensors[comm.rank])"]
    says += [f"rank {rank}: 1. {name} {text}" for rank, text in enumerate(shown)]
    return Deadlock(sums_of, tensors, collective, transport=transport, says=says)


def sent_to_another(transport, late, expected, shown):
    says = ["rank 0 sends float32 [3], at", f"rank 1 receives into {shown}, at", HERE]
    says += ["(comm.send, comm.recv)[comm.rank](mine, 1 - comm.rank)"]
    return Deadlock(misfit, [torch.ones(3), expected], late, transport=transport, says=says)


Deadlock = partial(Fault, error=DeadlockError)
KILLED = ["rank 1 was killed by SIGKILL in mid-run", "(the system does that when memory runs"]
MEMORY = ["the rank held up to", "Next step: "]
FAULTS = {
    "01 raises": [
        Fault(
            raises_on_one, world_size=3, rank=1,
            says=["rank 1 raised KeyError: 'the missing key'", "Traceback of rank 1:", HERE,
                  "raises_on_one", '{}["the missing key"]'],
        ),
        Fault(
            raises_with_a_cause, world_size=1, rank=0,
            says=["ValueError: the shapes", "inconsistent tensor size", HERE, "from error"],
        ),
        Fault(
            raises_unreadable, world_size=1, rank=0,
            says=["raised Unreadable: its text cannot be shown", HERE, "raise Unreadable"],
        ),
    ],
    "02 is killed": [
        Fault(lambda comm, _: None, KillsItsReader(), says=["by SIGKILL before it had started"]),
        Fault(
            killed_while_another_waits, world_size=3, rank=1,
            says=[KILLED[0], "Rank 0 was waiting for it in barrier at", HERE, "comm.barrier()"],
        ),
        *(Fault(killed_inside, operation, transport=transport, rank=1, says=KILLED)
          for operation, transport in itertools.product(OPERATIONS, TRANSPORTS)),
        Fault(
            lambda comm: comm.rank and KillsItsWriter(), rank=1,
            says=["rank 1 was killed by SIGKILL"],
        ),
    ],
    "03 leaves": [
        *(Fault(leaves_with, code, rank=1,
                says=[f"rank 1 left early with exit code {code}",
                      "Rank 0 was waiting for it in recv at", "comm.recv(torch.empty(1), 1)"])
          for code in (0, 3)),
        Fault(
            calls_exit, rank=0,
            says=["rank 0 called sys.exit('enough')", 'sys.exit("enough")',
                  "Rank 1 was waiting for it in barrier"],
        ),
    ],
    "04 deadlock": [
        *(Deadlock(all_receive_first, world_size=ranks,
                   says=["deadlock: rank 0 -> rank 1", f"rank {ranks - 1} -> rank 0",
                         "rank 0 is in recv, waiting for rank 1 to send float32 [2]", HERE,
                         "comm.recv(other, (comm.rank + 1) % comm.world_size)", "comm.exchange"])
          for ranks in (2, 3, 4)),
        Deadlock(
            lambda comm: comm.send(torch.ones(1), 1 - comm.rank),
            says=["is in send, waiting for rank 1 to receive"],
        ),
        Deadlock(one_returns, says=["rank 0 has returned, but rank 1 still waits for it"]),
        Deadlock(one_skips, world_size=3, says=["waiting for rank 1 at barrier number 2"]),
    ],
    "05 hang": [
        Fault(
            hangs, world_size=3, timeout_s=3, error=DeadlineError,
            says=["deadline of 3 s", "rank 0 was in recv", "comm.recv(torch.empty(1), 1)",
                  "rank 1 was in its own code", "rank 2 was in its own code", HERE,
                  "ctypes.PyDLL(None).sleep(60)", "Next step: look for"],
        ),
    ],
    "06 shapes differ": [
        *(sent_to_another(transport, late, torch.zeros(2, 2), "float32 [2, 2]")
          for transport, late in itertools.product(TRANSPORTS, (0, 1))),
        # As many elements on both: only their shapes tell.
        *(differ(*way, [torch.ones(4), torch.ones(2, 2)], "float32 [4]", "float32 [2, 2]")
          for way in COLLECTIVES_ON),
    ],
    "07 dtypes differ, of one size and of two": [
        fault
        for transport, dtype in itertools.product(TRANSPORTS, (torch.int32, torch.float64))
        for other in [torch.zeros(3, dtype=dtype)]
        for shown in [f"{str(dtype).removeprefix('torch.')} [3]"]
        for fault in (
            sent_to_another(transport, 1, other, shown),
            differ(tree_all_reduce, transport, [torch.ones(3), other], "float32 [3]", shown),
        )
    ],
    "08 another order, one call more": [
        *(Deadlock(in_another_order, world_size=3, transport=transport,
                   says=["call different collectives", "the same order",
                         "rank 0: 1. barrier, 2. broadcast float32 [2] from rank 0",
                         ": 1. barrier, 2. ring_all_reduce float32 [2] sum"])
          for transport in TRANSPORTS),
        *(Deadlock(one_call_more, collective, transport=transport,
                   says=["has returned, but rank 1 still", "collective(comm, torch.ones(2))",
                         rf"~  rank 0: \.\.\., .*5. {shown_name(collective, transport)} float32",
                         rf"~  rank 1: \.\.\., .*6. {shown_name(collective, transport)} float32"])
          for collective, transport in COLLECTIVES_ON),
    ],
    "14 begun twice, used after the end": [
        Fault(
            lambda comm: torch.distributed.init_process_group("gloo"),
            says=["ValueError: trying to initialize", "init_process"],
        ),
        Fault(communicates_after_the_end, says=["used after the end of its run", "labkit.run"]),
        Fault(lambda comm: {"comm": comm}, says=["a comm belongs to its rank"]),
    ],
    "19 a run inside a run": [
        Fault(
            lambda comm: run(print, world_size=2), world_size=1, rank=0,
            says=["ValueError: labkit.run was called inside a rank of another run",
                  "start runs from", HERE, "run(print"],
        ),
    ],
    "20 a result that cannot be pickled": [
        Fault(
            lambda comm: {"fine": 1, "locks": [threading.Lock()]}, world_size=1, rank=0,
            says=["rank 0 raised UnpicklableError: the result cannot be sent back",
                  "value['locks'][0] (_thread.lock)", "Return tensors, numbers"],
        ),
    ],
    "25 out of memory": [
        *(Fault(takes_too_much, what, limit, rank=1, says=[*MEMORY, HERE, line])
          for what, line in (("a tensor", "torch.empty(2**30"), ("an object", "bytearray(2**30)"))
          for limit in ("AS", "DATA")),
        Fault(takes_too_much, "a tensor", rank=1, says=["1073741824 bytes"]),
        Fault(takes_too_much, "a result", rank=1, says=["model or result", MEMORY[0]]),
    ],
}  # fmt: skip


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
        case = Case(tmp_path, patch, capsys)
        with case.row():
            yield case


@pytest.mark.parametrize("row", FAULTS)
def test_a_run_fails_with_one_clear_error(row, case):
    for fault in FAULTS[row]:
        case.fails(fault)


# The rows in which the result must be right, on every rank


def views(comm):
    for all_reduce in ALL_REDUCES:
        mine = comm.rank + 1.0
        matrix, leaf = torch.full((3, 4), mine), torch.full((2,), mine, requires_grad=True)
        conjugate = torch.full((2,), complex(mine, mine))
        # Strided, and larger than a segment of shared memory.
        large = torch.full((150_000, 2), mine)
        for view in (matrix.t()[1:], leaf, conjugate.conj(), matrix[:0], large[:, 1]):
            assert all_reduce(comm, view) is view
        assert matrix.tolist() == [[mine, 6, 6, 6]] * 3
        assert (leaf.tolist(), leaf.is_leaf, leaf.requires_grad) == ([6, 6], True, True)
        assert conjugate.tolist() == [complex(6, 6)] * 2
        assert large.unique(dim=0).tolist() == [[mine, 6]]


def not_numbers(comm):
    """As in PyTorch."""
    for all_reduce in ALL_REDUCES:
        nan = torch.tensor([float("nan") if comm.rank == 1 else 1.0, 1.0])
        for operation in ("sum", "mean", "max", "min", "product"):
            assert all_reduce(comm, nan.clone(), operation).isnan().tolist() == [True, False]
        half = all_reduce(comm, torch.tensor([60000.0], dtype=torch.float16))
        byte = all_reduce(comm, torch.tensor([100], dtype=torch.uint8))
        assert (half.tolist(), byte.tolist()) == ([float("inf")], [300 % 256])


def large_results(comm):
    return torch.full((25_000_000,), 2.0)


WORKS = {
    "11 views": views,
    "12 not numbers": not_numbers,
    "20 a result of 100 MB": large_results,
}


@pytest.mark.parametrize("row", WORKS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_run_works(row, transport, case):
    with case.timed():
        run(WORKS[row], world_size=3, transport=transport)


# The other rows


def test_15_ports(case):
    """The port is taken: another. The host cannot be reached: its address and the seconds."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):  # taken by another program already
            taken.bind(("127.0.0.1", 29500))
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


def test_16_world_sizes(case):
    """A world size far above the cores: a warning. (What is none: tests/test_limits.py.)"""

    def stop(*args, **kwargs):
        raise KeyboardInterrupt

    case.patch.setattr(devices, "num_cores", lambda: 1)
    case.patch.setattr(launch, "dump_call", stop)
    with (
        pytest.warns(UserWarning, match="world_size 5 is far above this machine's 1 core:"),
        contextlib.suppress(KeyboardInterrupt),
    ):
        run(print, world_size=5)


def started_in(kernel):
    """The processes of the ranks of a run without end."""
    kernel.send(
        """
        def works(comm):
            print(os.getpid(), flush=True)
            while True:
                comm.barrier()

        labkit.run(works, world_size=2, device="cpu")
        """
    )
    lines = (re.fullmatch(r"\[rank \d\] (\d+)\n", line) for line in iter(kernel.line, ""))
    return [int(found[1]) for found in itertools.islice(filter(None, lines), 2)]


@pytest.mark.fresh
def test_17_stopped(case, kernel):
    """The stop button in mid-run: KeyboardInterrupt; ranks gone; run again at once."""
    ranks = started_in(kernel)
    with case.timed():
        # A terminal and Jupyter signal every process of the group, the starting server among them.
        kernel.interrupt()
        assert kernel.printed() == "KeyboardInterrupt\n"
    assert not any(map(is_alive, ranks))
    again = "print(labkit.run(lambda comm: comm.rank, world_size=2, device='cpu').values)"
    assert kernel.runs(again) == "[0, 1]\n"


@pytest.mark.fresh
@pytest.mark.parametrize("end", ["kill", "hang_up"])
def test_18_kernel_killed(end, case):
    """The kernel is killed in mid-run, or its terminal closes: no rank is left."""
    # The path of a socket in it must be short.
    kernel = Kernel(Path(tempfile.mkdtemp(dir=os.environ["TESTS_TMPDIR"])))
    ranks = started_in(kernel)
    getattr(kernel, end)()
    assert wait_until(lambda: not any(map(is_alive, [*ranks, *kernel.session])), 60)
    kernel.close()


def neighbor(comm, offset):
    mine, theirs = torch.tensor([comm.rank + offset + 0.0]), torch.empty(1)
    comm.exchange(mine, 1 - comm.rank, theirs, 1 - comm.rank)
    return theirs.item()


def test_19_threads(case):
    """From a widget's callback or a thread, two at once: works."""
    with ThreadPoolExecutor(2) as pool, case.timed():
        found = list(pool.map(lambda offset: run(neighbor, offset, world_size=2), (10, 20)))
    assert [result.values for result in found] == [[11, 10], [21, 20]]
    _of_the_course("workbook.widgets")
    import ipywidgets

    button = ipywidgets.Button()
    button.on_click(lambda _: found.append(run(neighbor, 30, world_size=2)))
    button.click()
    button.close()
    assert found[-1].values == [31, 30]


# By row, what a shell does with a script of two ranks, and what is printed.
STARTED = {
    "a program from stdin, a long TMPDIR": (
        "mkdir {long} && TMPDIR={long} python - < good.py && rmdir {long}",
        "[0, 1]",
    ),
    "pdb": ("python -m pdb -c continue -c quit good.py < /dev/null", "[0, 1]"),
    "forks of a process that has run": ("python pools.py", "[0, 1]\nno daemonic process do so"),
    "closed standard streams": ("python good.py <&- 2>&-", "[0, 1]"),
    "a folder that is gone": ("python gone.py", "current folder has been removed"),
    "no guard": ("python bare.py", "it has to be called under if __name__"),
    "few files": ("ulimit -n 24; python good.py", "may open 24 files (ulimit -n)"),
    # As a user who has no other processes, and may read this one's files.
    "few processes": (
        "setpriv --reuid 61234 --clear-groups --inh-caps +dac_override --ambient-caps "
        "+dac_override prlimit --nproc=14 python good.py",
        "may have 14 (ulimit -u;",
    ),
}
GOOD = """
import labkit, os
from multiprocessing import Pool
from concurrent.futures import ProcessPoolExecutor

def rank(comm):
    return comm.rank

def ranks(number):
    return labkit.run(rank, world_size=number, device="cpu").values
"""
GONE = "labkit.run, os.mkdir('d'), os.chdir('d'), os.rmdir('../d'), ranks(2)\n"
IN_POOLS = """
if __name__ == "__main__":
    ranks(1)
    with ProcessPoolExecutor(1) as pool:
        print(*pool.map(ranks, [2]), flush=True)
    with Pool(1) as pool:
        pool.map(ranks, [2])
"""


@pytest.mark.fresh
@pytest.mark.parametrize("way", STARTED)
def test_19_started_in_unusual_ways(way, case):
    """It works, or the reason given is the true one; no temporary folder is left."""
    command, says = STARTED[way]
    if "setpriv" in command and (os.getuid() or not shutil.which("setpriv")):
        pytest.skip("only root can become a user without processes")
    scripts = {"good": 'if __name__ == "__main__":\n    print(ranks(4)[:2])\n'}
    scripts |= {"bare": "print(ranks(2))\n", "pools": IN_POOLS, "gone": GONE}
    for name, text in scripts.items():
        (case.folder / f"{name}.py").write_text(GOOD + text)
    temporary = case.folder / "t"
    temporary.mkdir(mode=0o777)
    command = command.replace("python ", f"{sys.executable} ").format(long=temporary / ("x" * 99))
    settings = {"cwd": case.folder, "env": os.environ | {"TMPDIR": str(temporary)}}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, **settings)
    check_words(done.stdout + done.stderr, says.splitlines())
    assert list(temporary.iterdir()) == []


def test_20_pickling(case):
    """A closure that cannot be pickled: names the object."""
    lock = threading.Lock()
    inside = "it uses lock (_thread.lock)", "inside the"
    case.refused(lambda: run(lambda comm: lock, world_size=2), *inside)
    case.refused(lambda: run(print, {"a": lock}, world_size=2), "args[0]['a'] (_thread.lock)")
    case.refused(lambda: run(3, world_size=1), "fn must be a function of a comm, got int")
    link = "10ms,1GB/s"
    case.refused(lambda: run(print, world_size=1, link=link), "must be a labkit.EmulatedLink")


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


def test_22_no_gpus(case):
    """CUDA where there is none: one line."""
    case.patch.setattr(devices, "num_gpus", lambda: 0)
    for device in ({"device": "cuda"}, {"devices": "cuda:0"}):
        case.refused(lambda: run(print, world_size=1, **device), r"~\A.*CUDA GPU.*\Z")  # noqa: B023


# By row, a cell in a kernel with a GPU, and what it prints.
ON_A_GPU = {
    # The choice and its consequence in one line.
    "22 more ranks than GPUs": (
        "print(labkit.run(lambda comm: str(comm.device), world_size=2).values)",
        "ranks share a GPU: they talk over gloo through host memory, .*"
        r"times are not those of more GPUs.*\n\['cuda:0', 'cuda:0'\]",
    ),
    # Never a fork after CUDA; before its function begins, labkit sets a rank's GPU.
    "23 CUDA is initialized": (
        """
        def fresh(comm):
            began = torch.cuda.is_initialized()
            x = torch.ones(2, device=comm.device)
            labkit.collectives.ring_all_reduce(comm, x)
            return began, x.tolist(), torch.cuda._is_in_bad_fork()

        total = torch.ones(3, device="cuda").sum()
        print(torch.cuda.is_initialized())
        print(labkit.run(fresh, world_size=2).values)
        print(labkit.run(fresh, world_size=2, device="cpu").values)
        """,
        r"True\n(.*\n)?\[(\(True, \[2.0, 2.0\], False\)(, )?){2}\]"
        r"\n\[(\(False, \[2.0, 2.0\], False\)(, )?){2}\]",
    ),
}


@pytest.mark.fresh
@pytest.mark.parametrize("row", ON_A_GPU)
def test_in_a_kernel_with_a_gpu(row, case, kernel):
    cell, printed = ON_A_GPU[row]
    assert re.fullmatch(printed, kernel.runs(cell).strip())


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
    assert kernel.runs(cell).splitlines() == ["[2.0, 2.0] []", *["[2.0, 2.0] ['old']"] * 3]
    # What does not fit: a queue's semaphores, and then the batches.
    for size in (4, 512):
        cell = f"""
            from torch.utils.data import DataLoader, TensorDataset

            def loads(comm):
                data = TensorDataset(torch.zeros(64, 10_000))
                return sum(len(batch) for batch, in DataLoader(data, batch_size=16, num_workers=2))

            os.system("mount -o remount,size={size}k /dev/shm")
            labkit.run(loads, world_size=2, device="cpu")
            """
        with case.timed():
            printed = kernel.runs(cell)
        says = ["~WorkerError: rank [01] raised ", "The DataLoader's 2 workers keep up to"]
        says += ["2.44 MiB on each rank", f"of {size} KiB free", "Next step: a"]
        check_words(printed, [*says, "num_workers=0", "--shm-size", "in DataLoader(data"])
    left = kernel.runs("os.remove('/dev/shm/old'); print(*os.listdir('/dev/shm'))").split()
    # A rank that is killed while the C library makes a semaphore leaves that one's temporary name.
    assert [name for name in left if not re.fullmatch(r"sem\.\w{6}", name)] == []


def test_26_data(case):
    """Data missing, truncated, offline: which file, how to get it."""

    def offline(request, *args, **kwargs):
        raise URLError("Temporary failure in name resolution")

    folder, empty = case.folder / "digits", case.folder / "empty"
    shutil.copytree(PACKAGE_DATA / "digits", folder)
    empty.mkdir()
    images, restore = folder / "train-images-idx3-ubyte", "labkit/workload/data/digits"
    images.write_bytes(images.read_bytes()[:5000])
    digits = partial(load_dataset, "digits", root=folder)
    mnist = partial(load_dataset, "mnist", root=empty)
    case.refused(digits, str(images), "5000 bytes", restore)
    images.unlink()
    case.refused(digits, f"{images} is missing", restore, error=FileNotFoundError)
    says = "mnist is not in", str(empty), "--download", 'load_dataset("mnist", download=True)'
    case.refused(mnist, *says, error=FileNotFoundError)
    case.patch.setattr(urllib.request, "urlopen", offline)
    says = str(empty), "Temporary failure in name resolution", "Check the network"
    case.refused(lambda: mnist(download=True), *says)
    assert list(empty.iterdir()) == []


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
    says = f"{part.name} has {len(whole) - 10} bytes, {len(whole)} were written to a file"
    damaged = contents(newer)
    # On another number of ranks: what is left continues where one device would.
    result = train(epochs=2, resume=True, world_size=1)
    assert f"skipped {newer.name}: {says}; continues from {older.name}" in result.notes["note"]
    assert set(damaged.values()) <= set(contents(folder).values()), "what is damaged is kept"
    once = labkit.train_with("single", **settings | {"epochs": 2, "checkpoint_dir": None})
    assert result.difference_from(once) < 1e-5
    for path in folder.glob("step-*/rank0.safetensors"):
        path.write_bytes(path.read_bytes()[:100])
    refused(f"no checkpoint in {folder} is whole", "has 100 bytes, ", "They are as they were")


def contents(folder):
    """The bytes of all files, by name."""
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_28_disk_full(case):
    """The disk is full while progress is written: the old file is intact."""
    progress = _of_the_course("workbook.notebook.record")
    progress.note_verdict("first", "passed", True)
    with at_most(20):
        progress.note_verdict("second", "passed", True)
    assert "progress is not kept" in case.capsys.readouterr().err
    assert set(progress.read().exercises[""]) == {"first", "second"}


@pytest.mark.fresh
def test_28_disk_full_at_a_result(case, kernel):
    """Every file that can be written is written, and the exit status is 1."""
    if not kernel.has_disks:
        pytest.skip("this user may not mount a file system of their own")
    disk = kernel.disk
    cell = f"""
        from labkit.__main__ import main
        open("{disk}/weights", "w").write("old")
        words = "--strategy single --train-size 64 --device cpu --save {disk}/weights"
        print(main(["train", *words.split(), "--json", "{disk}/a.json"]))
        print(open("{disk}/weights").read(), sorted(os.listdir("{disk}")))
        """
    printed = kernel.runs(cell)
    assert f"labkit: cannot write {disk}/weights: No space left on device\n" in printed
    assert printed.endswith("1\nold ['a.json', 'weights']\n")


def test_29_progress_damaged(case):
    """The progress file is damaged: said once, set aside, the course goes on."""
    record = _of_the_course("workbook.notebook.record")
    path = case.folder / "data" / "progress.json"
    path.parent.mkdir()
    case.patch.setenv("LABKIT_PROGRESS", str(path))
    for number, content in enumerate((b'{"version": 1, "exer', b"\xff\x00", b"[7]"), start=1):
        path.write_bytes(content)
        case.patch.setattr(record, "_pending", {})
        assert record.read().exercises == {}
        record.note_verdict("ring", "passed", True)
        assert set(record.read().exercises[""]) == {"ring"}
        kept = list(path.parent.glob("progress.damaged-*.json"))
        assert len(kept) == number
        assert content in {one.read_bytes() for one in kept}
        (said,) = case.capsys.readouterr().err.splitlines()
        check_words(said, [f"{path} is damaged (", "a new one is begun"])


def test_30_sliders(case):
    """A slider moved while busy: the last value applies."""
    plots = _of_the_course("workbook.plots")
    import ipywidgets
    from matplotlib.figure import Figure

    from workbook.widgets.explorer import Explorer

    begun, later = threading.Event(), threading.Event()

    def draw(size):
        if size == 1:
            begun.set()
            later.wait(0.3)
        return plots.CaptionedFigure(Figure(), alt=f"of size {size}", caption="Empty axes.")

    size = ipywidgets.IntSlider(0, 0, 5)
    explorer = Explorer(draw, size=size)
    slow = threading.Thread(target=setattr, args=(size, "value", 1))
    slow.start()
    begun.wait()
    for value in (3, 5, 2):
        size.value = value
    later.set()
    slow.join()
    assert 'alt="of size 2"' in explorer.view.value
    explorer.close()


def _of_the_course(name):
    """A room of the course; the core can be had without it, and so can its rows."""
    return pytest.importorskip(name, exc_type=ModuleNotFoundError)
