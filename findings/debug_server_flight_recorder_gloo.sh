#!/usr/bin/env bash
# PyTorch 2.15.0: on gloo the debug server cannot show its own flight recorder.
#
# torch.distributed.debug.start_debug_server(port, dump_dir=...) serves the flight recorders of all
# ranks as JSON (/fr_trace_json) and as tables (/fr_trace), and writes stacks and the tables into
# dump_dir. With a plain gloo group, the tables fail: the recorder of each rank writes its
# "pg_config" under the empty name,
#
#     "pg_config": {"": {"desc": "", "name": "", "ranks": "[0, 1]"}},
#
# while its entries are of the group ["0", "default_pg"]. /fr_trace_json answers 200, /fr_trace
# answers 500 with KeyError(('0', 0)), and dump_dir gets stacks_*.txt but never fr_trace_*.txt.
# Who reads these dumps has to take the groups from the entries.
#
# Output seen:
#     pg_config of rank 0: {'': {'desc': '', 'name': '', 'ranks': '[0, 1]'}}
#     groups of its entries: ['0']
#     /fr_trace: HTTP 500 KeyError(('0', 0))
#     files in dump_dir: ['stacks']
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.15.0 jinja2==3.1.6 tabulate==0.10.0 \
  requests==2.34.2 numpy==2.4.6

cat > "$folder/job.py" <<'PYTHON'
import json
import os
import re
import time
import urllib.error
import urllib.request

import torch
import torch.distributed as dist
from torch.distributed.debug import start_debug_server, stop_debug_server

PORT = 25987


def get(page):
    try:
        with urllib.request.urlopen(f"http://localhost:{PORT}/{page}", timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, str(error.reason)


dist.init_process_group("gloo")
start_debug_server(PORT, dump_dir="dumps", dump_interval=1.0)
for _ in range(3):
    dist.all_reduce(torch.ones(4))
if dist.get_rank() == 0:
    for _ in range(60):
        try:
            get("")
            break
        except OSError:
            time.sleep(0.5)
    status, page = get("fr_trace_json")
    assert status == 200
    dump = json.loads(re.search(r"<pre>(.*?)</pre>", page, re.DOTALL)[1])
    groups = sorted({entry["process_group"][0] for entry in dump["entries"]})
    print("pg_config of rank 0:", dump["pg_config"])
    print("groups of its entries:", groups)
    status, reason = get("fr_trace")
    print(f"/fr_trace: HTTP {status} {reason.removeprefix('Exception: ')}")
    time.sleep(3)
    kinds = {re.sub(r"_\d{8}_.*", "", name) for name in os.listdir("dumps")}
    written = sorted(kind for kind in kinds if "health" not in kind)
    print("files in dump_dir:", written)
    assert list(dump["pg_config"]) == [""] and groups == ["0"]
    assert status == 500 and "KeyError" in reason
    assert written == ["stacks"]
dist.barrier()
if dist.get_rank() == 0:
    stop_debug_server()
dist.destroy_process_group()
PYTHON

cd "$folder"
OMP_NUM_THREADS=1 "$folder/env/bin/torchrun" --nproc-per-node 2 job.py 2> errors.txt || {
    tail -20 errors.txt
    exit 1
}
