#!/usr/bin/env bash
# A torch.distributed backend that is written in Python and stands in a composite name.
#
# torch 2.15.0. init_process_group("cpu:mine,cuda:gloo") calls the function that makes "mine"; if that
# returns a ProcessGroup, PyTorch takes it as the whole group and never makes the gloo half. No error:
# the configuration still says "cpu:mine,cuda:gloo". In the other order, "cuda:gloo,cpu:mine", the gloo
# half is made and then dropped. (Beside nccl it ends in "ProcessGroup name not set".)
#
# Output seen:
#   cpu:mine,cuda:gloo -> Mine, which says it is cpu:mine,cuda:gloo and has [] backends
#   cuda:gloo,cpu:mine -> Mine, which says it is cuda:gloo,cpu:mine and has [] backends
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.15.0 numpy
cat > "$folder/names.py" <<'PY'
import torch.distributed as dist


class Mine(dist.ProcessGroup):
    def __init__(self, options):
        super().__init__(options.group_rank, options.group_size)

    def getBackendName(self):
        return "mine"

    def _set_group_name(self, name):
        pass

    def _set_group_desc(self, description):
        pass


dist.Backend.register_backend("mine", lambda options, _: Mine(options), True, devices=["cpu"])
for name in ("cpu:mine,cuda:gloo", "cuda:gloo,cpu:mine"):
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    config = dist.get_backend_config()
    devices = list(group._device_types)
    print(f"{name} -> {type(group).__name__}, which says it is {config} and has {devices} backends")
    dist.destroy_process_group()
PY
printf '%s\n' \
  'cpu:mine,cuda:gloo -> Mine, which says it is cpu:mine,cuda:gloo and has [] backends' \
  'cuda:gloo,cpu:mine -> Mine, which says it is cuda:gloo,cpu:mine and has [] backends' \
  > "$folder/seen"
"$folder/venv/bin/python" "$folder/names.py" 2>/dev/null | tee "$folder/now"
diff "$folder/seen" "$folder/now"
