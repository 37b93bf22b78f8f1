#!/usr/bin/env bash
# accelerate 1.15.0 (torch 2.15.0): accelerate launch --cpu --num_processes 2 starts one process.
#
# The number is accepted, nothing is said of it, and the script finds neither RANK nor WORLD_SIZE:
# a program that asks for two replicas trains one. torchrun starts two with the same script, and
# accelerate's state then sees both.
#
# Seen:
#   accelerate launch: process 0 of 1, WORLD_SIZE unset
#   torchrun: process 0 of 2, WORLD_SIZE 2 / process 1 of 2, WORLD_SIZE 2
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.15.0 accelerate==1.15.0 numpy
cat > "$folder/case.py" <<'PYTHON'
import os

from accelerate import PartialState

state = PartialState(cpu=True)
world_size = os.environ.get("WORLD_SIZE", "unset")
line = f"process {state.process_index} of {state.num_processes}, WORLD_SIZE {world_size}\n"
with open(f"seen_{state.process_index}", "w") as file:
    file.write(line)
PYTHON
cd "$folder"
export OMP_NUM_THREADS=1 HF_HOME="$folder/home"
"$folder/env/bin/accelerate" launch --cpu --num_processes 2 case.py > output 2>&1
echo "accelerate launch: $(cat seen_*)"
[ "$(cat seen_*)" = "process 0 of 1, WORLD_SIZE unset" ]
rm seen_*
ACCELERATE_USE_CPU=true "$folder/env/bin/python" -m torch.distributed.run --standalone \
    --nproc-per-node 2 case.py > output 2>&1
echo "torchrun: $(paste -sd '/' seen_0 seen_1)"
[ "$(cat seen_0 seen_1)" = $'process 0 of 2, WORLD_SIZE 2\nprocess 1 of 2, WORLD_SIZE 2' ]
