#!/usr/bin/env bash
# transformers 5.24.0 (torch 2.15.0): once a process group exists, PreTrainedModel.save_pretrained()
# writes files on rank 0 only, even where each rank names a folder of its own. The other ranks get
# an empty folder, no error and no warning, though is_main_process is left at its default, True.
#
# A tokenizer's save_pretrained() still writes on every rank. So replicas that differ on purpose
# (local SGD, a model per rank) are lost without a word: all but that of rank 0.
# Without a process group the same call writes config.json and the weights.
#
# Seen, on two ranks that save into folders of their own:
#   before the group: rank 0 config.json model.safetensors; rank 1 config.json model.safetensors
#   with the group: rank 0 config.json model.safetensors; rank 1 (nothing)
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.15.0 transformers==5.24.0 numpy
cat > "$folder/case.py" <<'PYTHON'
import os

import torch
from transformers import BertConfig, BertModel

rank = os.environ["RANK"]
model = BertModel(
    BertConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
)
model.save_pretrained(f"before_{rank}")
torch.distributed.init_process_group("gloo")
model.save_pretrained(f"with_{rank}")
torch.distributed.destroy_process_group()
PYTHON
cd "$folder"
OMP_NUM_THREADS=1 "$folder/env/bin/python" -m torch.distributed.run --standalone \
    --nproc-per-node 2 case.py > output 2>&1 || {
    tail -20 output
    exit 1
}
files() { ls "$1" | grep -E '^(config.json|model.safetensors)$' | paste -sd ' '; }
echo "before the group: rank 0 $(files before_0); rank 1 $(files before_1)"
others=$(files with_1 || true)
echo "with the group: rank 0 $(files with_0); rank 1 ${others:-(nothing)}"
both="config.json model.safetensors"
[ "$(files before_0)" = "$both" ] && [ "$(files before_1)" = "$both" ]
[ "$(files with_0)" = "$both" ] && [ -z "$others" ]
