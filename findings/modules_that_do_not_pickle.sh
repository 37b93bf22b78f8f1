#!/usr/bin/env bash
# PyTorch 2.15.0 with cloudpickle 3.1.2, Python 3.11: a function defined in a script or a
# notebook cannot be pickled by value once its body names torch.ops, torch.classes,
# torch.backends.cudnn or torch.backends.mkldnn, with the error
# "cannot pickle '_Ops' object" (_Classes, CudnnModule, MkldnnModule).
#
# cloudpickle pickles the submodules that a function reaches through `torch`. These are in
# sys.modules, but of subclasses of ModuleType, which its table of exact types does not have. So
# `torch.backends.cudnn.deterministic = True` in a cell keeps joblib, dask, Ray or any launcher
# that uses cloudpickle from sending that function. `import torch.backends.cudnn as cudnn` inside
# the function, or `getattr(torch, "ops")`, work.
#
# Seen: deterministic: TypeError cannot pickle 'CudnnModule' object
#       operator: TypeError cannot pickle '_Ops' object
#       matmul: sent
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 cloudpickle==3.1.2 numpy
cat > "$folder/functions.py" <<'PYTHON'
import cloudpickle
import torch


def deterministic():
    torch.backends.cudnn.deterministic = True


def operator(tensor):
    return torch.ops.aten.relu(tensor)


def matmul(tensor):
    return torch.linalg.norm(tensor)


for function in (deterministic, operator, matmul):
    try:
        cloudpickle.loads(cloudpickle.dumps(function))
        print(f"{function.__name__}: sent")
    except TypeError as error:
        print(f"{function.__name__}: TypeError {error}")
PYTHON
said=$("$folder/venv/bin/python" "$folder/functions.py")
echo "$said"
echo "$said" | grep -q "deterministic: TypeError cannot pickle 'CudnnModule' object"
echo "$said" | grep -q "operator: TypeError cannot pickle '_Ops' object"
echo "$said" | grep -q "matmul: sent"
