#!/usr/bin/env bash
# Three trainers decide by the NAME of a torch.distributed backend, although PyTorch lets anyone
# register another. Here "mine" is gloo itself under a second name (Backend.register_backend), two
# ranks on the CPU. Versions: torch 2.15.0, pytorch-ignite 0.5.5, lightning 2.6.6, accelerate 1.15.0.
#
# 1. Ignite: idist.auto_model(model) wraps in DistributedDataParallel under "gloo". Under "mine" it
#    returns the bare model, without a warning, although Ignite has joined the group and reports a
#    world size of 2: each rank goes on to train a replica of its own.
# 2. Lightning: Fabric's all_reduce of an integer (what sync_dist=True does with a metric that counts)
#    sums and divides under "gloo". Under every other name it asks the backend for the operation AVG,
#    whether or not that backend can average integers.
# 3. accelerate: with cpu=True it refuses "mine" ("not available, please use gloo"). Without cpu=True, with
#    no GPU in sight, it makes the group and counts 2 processes, but prepare(model) returns the bare
#    model, without a warning: replicas train apart.
#
# Seen, rank 0:
SEEN='ignite gloo DistributedDataParallel
ignite mine Linear world size 2
lightning gloo SUM
lightning mine AVG
accelerate mine without cpu=True Linear processes 2'
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export CUDA_VISIBLE_DEVICES=-1
python3 -m venv env
env/bin/pip install --quiet uv==0.13.9
env/bin/uv pip install --quiet --python env/bin/python \
  torch==2.15.0 pytorch-ignite==0.5.5 lightning==2.6.6 accelerate==1.15.0 'numpy<3'

cat > program.py <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist


def gloo_by_another_name(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)


dist.Backend.register_backend("mine", gloo_by_another_name, devices=["cpu"])
trainer, name = sys.argv[1:]
words = [trainer, name]
if trainer == "accelerate":
    from accelerate import Accelerator, InitProcessGroupKwargs

    handler = InitProcessGroupKwargs(backend=name)
    accelerator = Accelerator(kwargs_handlers=[handler])
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    words += ["without cpu=True", type(model).__name__, "processes", accelerator.num_processes]
else:
    dist.init_process_group(name)
if trainer == "ignite":
    import ignite.distributed as idist

    model = idist.auto_model(torch.nn.Linear(2, 2))
    words.append(type(model).__name__)
    if name == "mine":
        words.append(f"world size {idist.get_world_size()}")
if trainer == "lightning":
    from lightning.fabric.utilities.distributed import _sync_ddp

    asked = []
    all_reduce = dist.all_reduce

    def note_operation(tensor, op, **options):
        asked.append(op)
        return all_reduce(tensor, dist.ReduceOp.SUM, **options)

    dist.all_reduce = note_operation
    _sync_ddp(torch.tensor(3), reduce_op="mean")
    words.append("AVG" if asked == [dist.ReduceOp.AVG] else "SUM")
if dist.get_rank() == 0:
    print(*words, flush=True)
dist.barrier()
dist.destroy_process_group()
PYTHON

for words in "ignite gloo" "ignite mine" "lightning gloo" "lightning mine" "accelerate mine"; do
  # shellcheck disable=SC2086
  env/bin/python -W ignore -m torch.distributed.run --nproc-per-node 2 program.py $words 2>> errors \
    | grep -E '^(ignite|lightning|accelerate) ' || { cat errors >&2; exit 1; }
done > lines
cat lines
[ "$(cat lines)" = "$SEEN" ] || { echo "this has changed" >&2; exit 1; }
