"""Pretended GPUs (tests/pretended): they behave as real ones where labkit looks, and pages run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "notebooks" / "01_one_device.ipynb"

pytestmark = pytest.mark.slow


def with_gpus(number):
    """The variables of a process that sees ``number`` pretended GPUs."""
    variables = {
        name: value for name, value in os.environ.items() if "VISIBLE_DEVICES" not in name
    }
    path = os.pathsep.join(map(str, (ROOT / "tests" / "pretended", ROOT)))
    return variables | {"LABKIT_PRETEND_GPUS": str(number), "PYTHONPATH": path}


def printed(script, number=2):
    """What a script prints in a process of its own; its errors fail the test."""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=with_gpus(number))
    assert not done.returncode, done.stderr
    return done.stdout


TENSORS = """
import copy, pickle, threading, torch

def fails(action):
    try:
        action()
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""

assert torch.cuda.device_count() == 2 and not torch.cuda.is_initialized()
here, there = torch.ones(3), torch.ones(3, device="cuda:1")
assert torch.cuda.is_initialized() and torch.cuda.memory_allocated(1) == 512
assert here.device.type == "cpu" and (2 * there)[1:].device == torch.device("cuda:1")
assert "same device" in fails(lambda: here + there)
assert "same device" in fails(lambda: torch.stack([here, there]))
assert "Tensor.cpu()" in fails(there.numpy)
assert "ordinal" in fails(lambda: torch.ones(1, device="cuda:2"))
assert "generator" in fails(lambda: torch.rand(1, device="cuda", generator=torch.Generator()))
copied = there.to("cuda:0")
copied += 1
assert there.tolist() == [1, 1, 1] and here.to("cpu") is here and copied.cpu().device.type == "cpu"
assert copy.deepcopy(there).device == pickle.loads(pickle.dumps(there)).device == there.device

layer = torch.nn.Linear(3, 2).cuda()
seen = []
layer.weight.register_hook(lambda gradient: seen.append(gradient.device))
layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.device))
assert "same device" in fails(lambda: layer(here))
optimizer = torch.optim.AdamW(layer.parameters())
scaler = torch.amp.GradScaler("cuda")
with torch.autocast("cuda"):
    loss = layer(here.cuda()).sum()
assert loss.dtype == torch.float16
scaler.scale(loss).backward()
scaler.step(optimizer)
assert seen == [torch.device("cuda:0")] * 2

begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin.record()
torch.cuda._sleep(30_000_000)
end.record()
assert 19 < begin.elapsed_time(end) < 2000
asked = []
thread = threading.Thread(target=lambda: asked.append(torch.ones(1).cuda().device))
torch.cuda.set_device(1)
thread.start(), thread.join()
assert asked == [torch.device("cuda:0")] and torch.cuda.current_device() == 1
assert here.pin_memory().is_pinned() and not here.is_pinned()
print("all as on two GPUs")
"""


CHECKPOINTS = """
import tempfile, torch
from types import SimpleNamespace
from labkit.training.checkpoint import Facts, newest, save, step_path

first = torch.arange(6.0, device="cuda:0").view(2, 3)
tensors = {"own/first": first.t(), "own/second": torch.ones(2, device="cuda:1")}
numbers = {"progress/sums": [0.0], "progress/draws": False, "progress/updates": -1}
tensors |= {name: torch.tensor(value) for name, value in numbers.items()}
tensors["random/cpu"] = torch.get_rng_state()
comm, folder = SimpleNamespace(rank=0, world_size=1, barrier=lambda: None), tempfile.mkdtemp()
save(comm, step_path(folder, 1), Facts(0, 1, [], {}), tensors)
found = newest(folder)[0].of("own")
assert found["first"].tolist() == [[k, k + 3] for k in range(3)], found
assert {tensor.device.type for tensor in found.values()} == {"cpu"}
print("copied")
"""


RUNS = """
import torch, labkit
import torch.distributed as dist

def facts(comm):
    mine, theirs = (torch.full((3,), float(comm.rank), device=comm.device) for _ in range(2))
    if comm.world_size > 1:
        comm.exchange(mine, 1 - comm.rank, theirs, 1 - comm.rank)
    dist.all_reduce(mine)
    return str(comm.device), dist.get_backend(), theirs[0].item(), mine[0].item()

def forgets(comm):
    comm.send(torch.ones(3), 1) if comm.rank == 0 else comm.recv(torch.ones(3), 0)

class Kept:
    pass

def keeps(comm):
    kept = Kept()
    kept.tensor, kept.model = torch.ones(2).to(comm.device), torch.nn.Linear(2, 1).to(comm.device)
    return kept

if __name__ == "__main__":
    kept = labkit.run(keeps, world_size=1, device="cuda").values[0]
    print(kept.tensor.device, type(kept.model.weight).__name__, kept.model.weight.device)
    for transport in ("auto", "gloo"):
        print(*labkit.run(facts, world_size=2, device="auto", transport=transport).values)
    try:
        labkit.run(forgets, world_size=2, device="auto")
    except labkit.WorkerError as error:
        print(".to(comm.device)" in str(error))
    settings = {"train_size": 100, "batch_size": 35, "dtype": "float64", "device": "cuda"}
    ring, single = (labkit.train_with(name, world_size=size, **settings)
                    for name, size in (("ring_all_reduce", 2), ("single", 1)))
    print(ring.difference_from(single) < 1e-10, ring.replicas_agree)
    print("initialised here:", torch.cuda.is_initialized())
"""


# Of which the first must find that no GPU was used before.
IN_TURN = """
import contextlib, io, json, traceback

told = {}
for name, script in SCRIPTS.items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(script, {"__name__": "__main__"})
        except Exception:
            traceback.print_exc(file=out)
    told[name] = out.getvalue()
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def told():
    """What the scripts print, in one process: to import torch takes it the longest."""
    scripts = {"runs": RUNS, "tensors": TENSORS, "checkpoints": CHECKPOINTS}
    return json.loads(printed(f"SCRIPTS = {scripts!r}\n{IN_TURN}"))


def test_tensors_and_events_are_as_on_two_gpus(told):
    assert told["tensors"] == "all as on two GPUs\n"


def test_a_checkpoint_of_several_gpus_is_copied_through_pinned_memory(told):
    """Each has a stream of its own for the copies."""
    assert told["checkpoints"] == "copied\n"


def test_ranks_get_gpus_and_the_caller_none(told):
    over = "('cuda:0', '{0}', 1.0, 1.0) ('cuda:1', '{0}', 0.0, 1.0)"
    # Also from inside an object, a result's tensors come to the CPU.
    returned, *lines = told["runs"].splitlines()
    assert returned == "cpu Parameter cpu"
    assert lines[:2] == [over.format("nccl"), over.format("gloo")]
    assert lines[2:] == ["True", "True True", "initialised here: False"]


def test_a_process_without_them_is_not_changed():
    script = "import sys, torch; print(torch.cuda.device_count(), 'pretended_gpus' in sys.modules)"
    assert printed(script, number=0) == "0 False\n"


def test_a_page_runs_on_two_and_says_the_same():
    stored = nbformat.read(PAGE, as_version=4)
    page = nbformat.read(PAGE, as_version=4)
    resources = {"metadata": {"path": str(PAGE.parent)}}
    client = NotebookClient(page, timeout=240, kernel_name="python3", resources=resources)
    client.execute(env=with_gpus(2) | {"LABKIT_LIVE": "0"}, stderr=subprocess.DEVNULL)
    for index, (before, after) in enumerate(zip(stored.cells, page.cells)):
        if "nbval-ignore-output" not in before.metadata.get("tags", []):
            assert texts(before) == texts(after), f"cell {index}"


def texts(cell):
    """The printed text of a cell, which may come in parts, and the kinds of its other outputs."""
    found = cell.get("outputs", [])
    printed = "".join(one.text for one in found if one.output_type == "stream")
    return printed, [one.output_type for one in found if one.output_type != "stream"]
