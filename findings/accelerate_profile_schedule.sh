#!/usr/bin/env bash
# accelerate 1.15.0 (torch 2.15.0): with a schedule, ProfileKwargs(output_trace_dir=...) writes what
# the profiler holds when the block ends, once: of several cycles the last one only.
#
# torch.profiler calls on_trace_ready after each cycle; accelerator.profile() exports one file after
# the block instead. Of two cycles the first is lost. With repeat left out (without end), what is
# kept depends on the number of steps: if the last step() has just ended a warm-up, the file has an
# empty step, and none of those that were recorded before.
# on_trace_ready=tensorboard_trace_handler(folder) keeps each cycle.
#
# Seen (wait 1, warmup 1, active 2; ten steps, each with one addition):
#   repeat 1: steps [2, 3] with 2 additions
#   repeat 2: steps [6, 7] with 2 additions
#   repeat none: steps [10] with 0 additions
#   repeat none, tensorboard_trace_handler: 3 files
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet torch==2.15.0 accelerate==1.15.0 numpy
cat > "$folder/case.py" <<'PYTHON'
import json
from pathlib import Path

import torch
from accelerate import Accelerator, ProfileKwargs
from torch.profiler import tensorboard_trace_handler


def train(folder, repeat, **keywords):
    cycle = {"wait": 1, "warmup": 1, "active": 2} | repeat
    kwargs = ProfileKwargs(activities=["cpu"], schedule_option=cycle, **keywords)
    accelerator = Accelerator(cpu=True, kwargs_handlers=[kwargs])
    ones = torch.ones(3)
    with accelerator.profile() as profiler:
        for _ in range(10):
            torch.add(ones, 1)
            profiler.step()
    return sorted(Path(folder).glob("*.json"))


def steps_and_additions(path):
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    steps = sorted(int(name[13:]) for name in names if name.startswith("ProfilerStep#"))
    return steps, names.count("aten::add")


seen = {}
for name, repeat in {"1": {"repeat": 1}, "2": {"repeat": 2}, "none": {}}.items():
    (path,) = train(name, repeat, output_trace_dir=name)
    seen[name] = steps_and_additions(path)
    steps, additions = seen[name]
    print(f"repeat {name}: steps {steps} with {additions} additions")
each = train("each", {}, on_trace_ready=tensorboard_trace_handler("each"))
print(f"repeat none, tensorboard_trace_handler: {len(each)} files")
assert seen == {"1": ([2, 3], 2), "2": ([6, 7], 2), "none": ([10], 0)}
assert [2, 3] in [steps_and_additions(path)[0] for path in each]
assert [6, 7] in [steps_and_additions(path)[0] for path in each]
PYTHON
cd "$folder"
OMP_NUM_THREADS=1 "$folder/env/bin/python" case.py 2> errors || {
    tail -20 errors
    exit 1
}
