#!/usr/bin/env bash
# Evaluate the multi-hop agent. BENCHMARK is a file of configs/eval (see each header): nq, triviaqa, hotpotqa, 2wikimultihopqa,
# musique, bamboogle or popqa.
# Usage: BENCHMARK=nq MODEL=models/mhqa_agent_7b evaluation/mhqa_agent/eval.sh [--dry-run] [key=value ...]
# MODEL is a model's folder, or the address of a server (then add model.tokenizer=DIR model.name=NAME).
# Needs: a wiki server at WIKI_RAG_SERVER_URL (afm serve wiki --index FOLDER).
# On a CPU: CONFIGS=configs/tiny/eval MODEL=runs/quickstart/rl evaluation/mhqa_agent/eval.sh data=FILE
# A relative MODEL starts at the caller's folder, or else at the project's; other relative paths at the project's.
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=/dev/null
. requirements/activate.sh .venv-rl .venv
BENCHMARK=${BENCHMARK:-nq}
CONFIGS=${CONFIGS:-configs/eval}
MODEL=${MODEL:?set it to the folder or address of the model, for example MODEL=models/mhqa_agent_7b}
[[ $MODEL == /* || $OLDPWD -ef . || ! -e $OLDPWD/$MODEL ]] || MODEL=$OLDPWD/$MODEL
exec afm eval "$CONFIGS/$BENCHMARK.yaml" "model.path=$MODEL" "$@"
