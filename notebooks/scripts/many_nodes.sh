#!/usr/bin/env bash
# Train on several machines. Run the same command on each of them:
#
#     bash many_nodes.sh HOST [further options of labkit train]
#
# HOST is one of the machines, by the name or address under which the others reach it. All need
# the same labkit, and a folder that they share.
#
#     NODES=2      machines. 2:4 begins with two; more may join, and the run goes on when some are
#                  lost, but for HOST: then start it again
#     RANKS=4      processes on this machine; by default one per GPU, or two where there is none
#     RUN=a        name of the run: two runs at the same time need two names
#     DIR=/shared  for checkpoints: the same command again goes on from the newest
#     CONF=A=1,B=2 more for torchrun's --rdzv-conf, such as keep_alive_interval=1: a machine counts
#                  as lost when it has been silent for three times as many seconds (5)
#     IS_HOST=0    a further torchrun on HOST itself
set -euo pipefail
host=$(getent ahostsv4 "$1" | awk 'NR == 1 { print $1 }') || { echo "no address of $1" >&2; exit 1; }
run=${RUN:-labkit}
if [[ $host == 127.* && $1 != 127.* && ${NODES:-2} != 1 ]]; then
    echo "many_nodes.sh: $1 is $host here, where no other machine finds it. Give its address" \
        "in your network ('ip -4 address' lists them)" >&2
    exit 1
fi
ranks=${RANKS:-$(python -c 'import torch; print(torch.cuda.device_count() or 2)')}
shift

# No fixed port, which another run may have: all machines derive the same from the run's name,
# below those that systems give to outgoing connections.
port=$((20000 + $(cksum <<< "$run" | cut -d ' ' -f 1) % 12000))

# This machine's address and network card towards HOST. Without them torchrun, gloo and NCCL look
# up the machine's own name, which often leads to 127.0.1.1, or choose another card.
route=$(ip -4 route get "$host")
address=$(sed -n 's/.* src \([0-9.]*\).*/\1/p' <<< "$route")
card=$(ip -4 -o address show to "$address" | awk 'NR == 1 { print $2 }')
export GLOO_SOCKET_IFNAME=$card NCCL_SOCKET_IFNAME=$card

# Where the machines meet is on HOST. torchrun knows a host by its name only, not by every address.
is_host=${IS_HOST:-$([[ $route == local* ]] && echo 1 || echo 0)}

# torchrun itself would try for a minute, and end with a page of traceback.
until ((is_host)) || timeout 2 bash -c ": < /dev/tcp/$host/$port" 2> /dev/null; do
    if ((SECONDS > ${PATIENCE:-60})); then
        echo "many_nodes.sh: nothing answers at $host:$port. Run the same command on $host, with" \
            "the same RUN, and let its firewall admit this machine ($address)" >&2
        exit 1
    fi
    sleep 1
done

# A store for each start of the ranks: torchrun's own would be gone with the machine that has it.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

# last_call_timeout: with NODES=2:4, how many seconds to wait for a third machine.
exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "$ranks" --max-restarts 10 \
    --rdzv-backend c10d --rdzv-id "$run" --rdzv-endpoint "$host:$port" \
    --rdzv-conf "is_host=$is_host,last_call_timeout=5${CONF:+,$CONF}" --local-addr "$address" \
    -m labkit train --strategy ddp --batch-size 64 --epochs 5 \
    --checkpoint-dir "${DIR:-runs/many_nodes}" --resume "$@"
