#!/usr/bin/env bash
# A Ray cluster for a training on several nodes; nobody without its token can join it or submit to it.
# Usage: train/ray_cluster.sh head|node|status|wait COUNT [options of `ray start`]
#   on the first node:  NODE_IP=10.0.0.1 train/ray_cluster.sh head
#   on each other one:  HEAD=10.0.0.1:6379 NODE_IP=10.0.0.2 train/ray_cluster.sh node     (RAY_AUTH_TOKEN_PATH: a copy of the head's)
#   on any: wait 2 returns when 2 nodes have joined (WAIT_S: seconds until it gives up)
#   then, on any:       MODEL=... train/web_agent/rl/train_dapo_web_agent.sh ray_address=10.0.0.1:6379
# It stays in the foreground; ending it ends the node. Keys and addresses of tools must be in its environment (environment.sh):
# workers inherit them. The repository, models, data and output folders have the same paths on all nodes.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v ray >/dev/null || PATH="$PWD/.venv/bin:$PATH"
# shellcheck source=/dev/null
source ./environment.sh
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
export RAY_USAGE_STATS_ENABLED=0 VERL_USE_EXTERNAL_MODULES=verl_ext
PORT=${PORT:-6379}
case "${1:-}" in
head)
    if [[ ! -s $RAY_AUTH_TOKEN_PATH ]]; then
        mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
        (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")
    fi
    echo "token: $RAY_AUTH_TOKEN_PATH; copy it to the other nodes, and start trainings with it in the environment"
    exec ray start --head --port "$PORT" --include-dashboard false --block \
        ${NODE_IP:+--node-ip-address "$NODE_IP"} "${@:2}"
    ;;
node)
    HEAD=${HEAD:?set it to the address of the head, for example HEAD=10.0.0.1:6379}
    [[ -s $RAY_AUTH_TOKEN_PATH ]] || { echo "$RAY_AUTH_TOKEN_PATH is missing: copy the token file of the head" >&2 && exit 1; }
    exec ray start --address "$HEAD" --block ${NODE_IP:+--node-ip-address "$NODE_IP"} "${@:2}"
    ;;
status)
    exec ray status --address "${HEAD:-127.0.0.1:$PORT}"
    ;;
wait)
    count=${2:?how many nodes to wait for, for example: train/ray_cluster.sh wait 8}
    joined=0
    for ((seconds = 0; seconds <= ${WAIT_S:-600}; seconds += 5)); do
        joined=$(ray status --address "${HEAD:-127.0.0.1:$PORT}" 2>/dev/null | grep -c '^ 1 node_' || true)
        ((joined < count)) || { echo "$joined of $count nodes have joined" && exit 0; }
        sleep 5
    done
    echo "error: $joined of $count nodes have joined in ${WAIT_S:-600} s; look at the output of the others" >&2
    exit 1
    ;;
*)
    echo "usage: train/ray_cluster.sh head|node|status|wait COUNT [options of ray start]" >&2
    exit 2
    ;;
esac
