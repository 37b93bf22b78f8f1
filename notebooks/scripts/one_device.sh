#!/usr/bin/env bash
# Train on one device. All other scripts end with the same parameters, in another time.
#
#     bash one_device.sh [further options of labkit train]
set -euo pipefail

python -m labkit train --strategy single --batch-size 64 --epochs 5 "$@"
