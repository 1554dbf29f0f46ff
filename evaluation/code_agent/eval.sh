#!/usr/bin/env bash
# Evaluate the code/math agent. BENCHMARK is a file of configs/eval (see each header): aime24, aime25, amc23, math500,
# olympiadbench, livecodebench_v4, livecodebench_v5 or codecontests.
# Usage: BENCHMARK=aime24 MODEL=models/code_agent_7b evaluation/code_agent/eval.sh [--dry-run] [key=value ...]
# MODEL is a model's folder, or the address of a server (then add model.tokenizer=DIR model.name=NAME).
# On a CPU: CONFIGS=configs/tiny/eval MODEL=runs/quickstart/rl evaluation/code_agent/eval.sh data=FILE
# A relative MODEL starts at the caller's folder, or else at the project's; other relative paths at the project's.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=/dev/null
. requirements/activate.sh .venv-rl .venv
BENCHMARK=${BENCHMARK:-aime24}
CONFIGS=${CONFIGS:-configs/eval}
MODEL=${MODEL:?set it to the folder or address of the model, for example MODEL=models/code_agent_7b}
[[ $MODEL == /* || $OLDPWD -ef . || ! -e $OLDPWD/$MODEL ]] || MODEL=$OLDPWD/$MODEL
exec afm eval "$CONFIGS/$BENCHMARK.yaml" "model.path=$MODEL" "$@"
