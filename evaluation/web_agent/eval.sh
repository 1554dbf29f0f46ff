#!/usr/bin/env bash
# Evaluate the web agent. BENCHMARK is a file of configs/eval: gaia, webwalker, browsecomp or hle (see each header).
# Usage: BENCHMARK=gaia MODEL=models/web_agent_7b evaluation/web_agent/eval.sh [--dry-run] [key=value ...]
# MODEL is a model's folder, or the address of a server (then add model.tokenizer=DIR model.name=NAME).
# Needs: search and page servers (tool_servers/servers.sh start), and a judge: GRM_BASE_URL, GRM_API_KEY, GRM_MODEL_NAME.
# On a CPU: CONFIGS=configs/tiny/eval MODEL=runs/quickstart/rl evaluation/web_agent/eval.sh data=FILE
# A relative MODEL starts at the caller's folder, or else at the project's; other relative paths at the project's.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=/dev/null
. requirements/activate.sh .venv-rl .venv
BENCHMARK=${BENCHMARK:-gaia}
CONFIGS=${CONFIGS:-configs/eval}
MODEL=${MODEL:?set it to the folder or address of the model, for example MODEL=models/web_agent_7b}
[[ $MODEL == /* || $OLDPWD -ef . || ! -e $OLDPWD/$MODEL ]] || MODEL=$OLDPWD/$MODEL
exec afm eval "$CONFIGS/$BENCHMARK.yaml" "model.path=$MODEL" "$@"
