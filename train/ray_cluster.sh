#!/usr/bin/env bash
# Starts a Ray cluster for training on several nodes. Nodes and runs that use the cluster need its token.
# Usage: train/ray_cluster.sh head|node|status|wait COUNT [options of `ray start`]
#   on the first node:  NODE_IP=10.0.0.1 train/ray_cluster.sh head                        (PORT: 6379 by default)
#   on each other node: HEAD=10.0.0.1:6379 NODE_IP=10.0.0.2 train/ray_cluster.sh node     (RAY_AUTH_TOKEN_PATH: a copy of the head's)
#   on the head:        wait 2 returns when 2 nodes have joined (WAIT_S: seconds until it gives up; HEAD=... on another node)
#   then, on the first: MODEL=... train/web_agent/rl/train_dapo_web_agent.sh ray_address=10.0.0.1:6379
# It stays in the foreground. Stopping it stops the node. Keys and addresses of tools must be in its environment
# (environment.sh), which workers inherit. The repository, models, data and output folders need the same paths on all nodes.
set -euo pipefail
cd "$(dirname "$0")/.."
command -v ray >/dev/null || PATH="$PWD/.venv-rl/bin:$PWD/.venv/bin:$PATH"
# shellcheck source=/dev/null
source ./environment.sh
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
export RAY_USAGE_STATS_ENABLED=0 VERL_USE_EXTERNAL_MODULES=verl_ext
PORT=${PORT:-6379}
fail() { echo "error: $1" >&2; exit "${2:-1}"; }
answers() { timeout 5 bash -c "exec 3<>/dev/tcp/${1%:*}/${1##*:}" 2>/dev/null; }
is_address() { [[ $1 =~ ^[^:/]+:[0-9]+$ ]] || fail "$2=$1: expected HOST:PORT, for example $2=10.0.0.1:6379" 2; }
has_token() { [[ -s $RAY_AUTH_TOKEN_PATH ]] || fail "$RAY_AUTH_TOKEN_PATH is missing: copy the token file of the head"; }
# Checks whether the output of `ray status` reports a rejected token, with which `ray start` would retry for minutes.
refused() {
    [[ $1 != *AuthenticationError* ]] ||
        fail "the cluster at $HEAD rejected the token in $RAY_AUTH_TOKEN_PATH; copy the token file of its head there"
}
# Runs `ray start` in place of this script. Of a Traceback, as after a timeout, it shows the last line and what to do.
start() {
    exec ray start "$@" 2> >(trap '' INT; exec awk '/^Traceback \(most recent/ { hold = 1 }
        !hold { print; fflush() }
        hold && NF { last = $0; sub(/[.]$/, "", last) }
        END { if (hold) print "error: ray did not start: " last "; run `ray stop`, check the load of this machine (uptime) " \
            "and the logs in /tmp/ray/session_latest/logs, then run the same command again" }' >&2)
}
is_ours() { python -c 'import socket, sys; socket.socket().bind((sys.argv[1], 0))' "$1" 2>/dev/null; }

command=${1:-}
case $command in head | node | status | wait) ;; -h | --help) sed -n '2,10s/^# //p' "$0" && exit 0 ;;
*) fail "got '$command'; usage: train/ray_cluster.sh head|node|status|wait COUNT [options of ray start]" 2 ;; esac
command -v ray >/dev/null || fail "ray: not found; make its environment: requirements/install-gpu.sh gpu-rl-vllm"
[[ $PORT =~ ^[1-9][0-9]{0,4}$ && $PORT -lt 65536 && ($PORT -lt 10001 || $PORT -gt 19999) ]] ||
    fail "PORT=$PORT: expected a port below 10001 or from 20000 to 65535 (Ray's workers use the others)" 2
[[ -z ${NODE_IP:-} ]] || is_ours "$NODE_IP" ||
    fail "NODE_IP=$NODE_IP: not an address of this machine; expected one of: $(hostname -I 2>/dev/null || hostname -i)"
case $command in
head)
    ! answers "${NODE_IP:-127.0.0.1}:$PORT" ||
        fail "port $PORT is in use here; is a head running (train/ray_cluster.sh status)? If not, choose another port: PORT=26379"
    if [[ ! -s $RAY_AUTH_TOKEN_PATH ]]; then
        mkdir -p "$(dirname "$RAY_AUTH_TOKEN_PATH")"
        (umask 077 && head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n' >"$RAY_AUTH_TOKEN_PATH")
    fi
    echo "token: $RAY_AUTH_TOKEN_PATH; copy it to the other nodes. Start training with RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=$RAY_AUTH_TOKEN_PATH"
    start --head --port "$PORT" --include-dashboard false --block \
        ${NODE_IP:+--node-ip-address "$NODE_IP"} "${@:2}"
    ;;
node)
    [[ -n ${HEAD:-} ]] || fail "HEAD: set it to the address of the head, for example HEAD=10.0.0.1:6379"
    is_address "$HEAD" HEAD
    has_token
    answers "$HEAD" || fail "HEAD=$HEAD: nothing answers there within 5 s; start the head first, and open its port to this node"
    refused "$(ray status --address "$HEAD" 2>&1 || true)"
    start --address "$HEAD" --block ${NODE_IP:+--node-ip-address "$NODE_IP"} "${@:2}"
    ;;
status)
    HEAD=${HEAD:-127.0.0.1:$PORT}
    is_address "$HEAD" HEAD
    answers "$HEAD" || fail "no cluster answers at $HEAD; start one: NODE_IP=10.0.0.1 train/ray_cluster.sh head"
    has_token
    text=$(ray status --address "$HEAD" 2>&1) && echo "$text" && exit 0
    refused "$text"
    fail "ray status failed: $(tail -n 1 <<<"$text")"
    ;;
wait)
    [[ ${WAIT_S:=600} =~ ^[1-9][0-9]{0,5}$ ]] || fail "WAIT_S=$WAIT_S: expected whole seconds, for example WAIT_S=600" 2
    [[ ${2:-} =~ ^[1-9][0-9]*$ ]] || fail "wait ${2:-}: how many nodes to wait for? For example: train/ray_cluster.sh wait 8" 2
    HEAD=${HEAD:-127.0.0.1:$PORT}
    echo "waiting up to $WAIT_S s for $2 nodes at $HEAD"
    for ((joined = 0; SECONDS <= WAIT_S; )); do
        text=$(ray status --address "$HEAD" 2>&1 || true)
        refused "$text"
        before=$joined joined=$(grep -c '^ 1 node_' <<<"$text" || true)
        ((joined == before)) || echo "$joined of $2 nodes have joined"
        ((joined < $2)) || exit 0
        sleep 5
    done
    answers "$HEAD" || fail "no cluster answers at $HEAD after $WAIT_S s; check the terminal of its head, or set HEAD=HOST:PORT"
    fail "$joined of $2 nodes have joined in $WAIT_S s; check the output of the other nodes"
    ;;
esac
