#!/usr/bin/env bash
# Serves a model for evaluations: with vLLM or SGLang if installed, else with our own server for CPUs.
# Waits until all replicas are healthy, prints options for `afm eval`, stays in the foreground. --dry-run prints the engines' commands.
# Usage: MODEL=models/web_agent_7b REPLICAS=4 TENSOR_PARALLEL=2 PORT=8000 evaluation/serve_model.sh [options of afm serve model]
# Needs REPLICAS x TENSOR_PARALLEL GPUs. Tested on a CPU. The command lines of vLLM 0.24 and SGLang are tested, but never ran on a GPU.
# A relative MODEL starts at the caller's folder, or else at the project's; other relative paths at the project's.
set -euo pipefail
cd "$(dirname "$0")/.."
# shellcheck source=/dev/null
. requirements/activate.sh .venv-rl .venv
MODEL=${MODEL:?set it to the folder of the model, for example MODEL=models/web_agent_7b}
[[ $MODEL == /* || $OLDPWD -ef . || ! -e $OLDPWD/$MODEL ]] || MODEL=$OLDPWD/$MODEL
exec afm serve model "$MODEL" --replicas "${REPLICAS:-1}" --tensor-parallel "${TENSOR_PARALLEL:-1}" --port "${PORT:-8000}" "$@"
