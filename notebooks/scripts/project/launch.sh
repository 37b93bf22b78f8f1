#!/usr/bin/env bash
# Train this project: bash launch.sh on one machine; on several, the same on each with the name of
# the first, as in NODES=2 bash launch.sh node0.
#
#     RANKS=4      processes on this machine; by default one per GPU, or two where there is none
set -euo pipefail
cd "$(dirname "$0")"
ranks=${RANKS:-$(python -c 'import torch; print(torch.cuda.device_count() or 2)')}
meet=(--standalone)
if [ "${1:-}" ]; then
    meet=(--nnodes "${NODES:?on several machines: how many}" --rdzv-backend c10d
        --rdzv-endpoint "$1:29400" --rdzv-id project)
fi
exec torchrun "${meet[@]}" --nproc-per-node "$ranks" --max-restarts 3 recipe.py
