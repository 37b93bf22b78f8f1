#!/usr/bin/env bash
# PyTorch 2.15.0, gloo: in a profile a send or receive lasts until its wait(), not until it is done.
#
# A rank sends 16 bytes with isend, learns by an all-reduce that the other rank has them, does
# something else for half a second, and calls wait(), which returns at once. In torch.profiler's
# events "gloo:send" lasts half a second; so does "gloo:recv" of an irecv whose bytes are there.
# "gloo:all_reduce" ends when it is over, also if its wait() comes half a second later.
# is_completed() is False until wait(), too (pytorch/pytorch#30723). So of the bubbles and the
# overlap of torch.distributed.pipelining such a profile says nothing: a send that was over in a
# microsecond seems to overlap with all computing up to its wait().
#
# Seen (ms, rounded to 100):
#   gloo:send 500, completed before wait(): False
#   gloo:recv 500, completed before wait(): False, bytes there: True
#   gloo:all_reduce 0, completed before wait(): True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.15.0 numpy
cat > "$folder/case.py" <<'PYTHON'
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

DONE = torch.ones(1)


def late_wait(start, tensor):
    """Profile an operation that both ranks have done long before its wait()."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        work = start(tensor)
        dist.barrier()
        time.sleep(0.5)
        completed = work.is_completed()
        there = bool((tensor == 1).all())
        begun_s = time.perf_counter()
        work.wait()
        assert time.perf_counter() - begun_s < 0.2, "wait() had to wait"
    events = [e for e in recorded.events() if e.name.startswith("gloo:")]
    (event,) = [e for e in events if e.name != "gloo:barrier"]
    tenths = round(event.time_range.elapsed_us() / 1e5)
    return event.name, tenths, completed, there


def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for _ in range(2):  # the first time it connects, and the profiler starts
        if rank == 0:
            sent = late_wait(lambda tensor: dist.isend(tensor, 1), torch.ones(4))
        else:
            received = late_wait(lambda tensor: dist.irecv(tensor, 0), torch.zeros(4))
        reduced = late_wait(lambda tensor: dist.all_reduce(tensor, async_op=True), torch.ones(4))
    if rank == 0:
        print(f"{sent[0]} {100 * sent[1]}, completed before wait(): {sent[2]}", flush=True)
        name, tenths, completed, _ = sent
        assert name == "gloo:send" and tenths >= 5 and not completed
    dist.barrier()
    if rank == 1:
        name, tenths, completed, there = received
        words = f"{name} {100 * tenths}, completed before wait(): {completed}"
        print(f"{words}, bytes there: {there}", flush=True)
        assert name == "gloo:recv" and tenths >= 5 and not completed and there
        print(f"{reduced[0]} {100 * reduced[1]}, completed before wait(): {reduced[2]}")
        name, tenths, completed, _ = reduced
        assert name == "gloo:all_reduce" and tenths < 4 and completed
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, args=(sys.argv[1],), nprocs=2)
PYTHON
OMP_NUM_THREADS=1 "$folder/env/bin/python" "$folder/case.py" "$folder/store" 2> "$folder/errors" || {
    tail -20 "$folder/errors"
    exit 1
}
