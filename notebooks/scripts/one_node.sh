#!/usr/bin/env bash
# Train on all GPUs of one machine, with a process for each.
#
#     bash one_node.sh [further options of labkit train]
#
#     RANKS=4      processes; by default one per GPU, or two where there is none
#     DIR=runs/a   for checkpoints: the same command again goes on from the newest
set -euo pipefail
ranks=${RANKS:-$(python -c 'import torch; print(torch.cuda.device_count() or 2)')}

# --standalone: torchrun chooses a free port, so that two runs on one machine never meet.
# --max-restarts: when a process dies, torchrun ends the others, starts all anew, and they go on
#     from the newest checkpoint.
# --batch-size is that of all ranks together, so it stays the same for any number of them.
exec torchrun --standalone --nproc-per-node "$ranks" --max-restarts 3 \
    -m labkit train --strategy ddp --batch-size 64 --epochs 5 \
    --checkpoint-dir "${DIR:-runs/one_node}" --resume "$@"
