#!/usr/bin/env bash
# Selects RL questions for the web agent as AFM does (configs/queries/web.yaml). Makes rl/train.parquet and rl/val.parquet.
# Run it again to resume. For a model trained with the published prompt: PROMPT=data/web_agent/raw/prompts/web_agent.txt
# Usage: MODEL=http://127.0.0.1:8000/v1 data/web_agent/select_queries.sh QUESTIONS.jsonl [..] [target=1000] [model_name=NAME]
set -euo pipefail
root=$(realpath "$(dirname "$0")/../..")
# shellcheck source=/dev/null
. "$root/requirements/activate.sh" .venv .venv-rl .venv-sft
MODEL=${MODEL:?set it to the folder of a model, or to the address of a server that has it}
OUT=${OUT:-$root/data/web_agent/queries}
SFT=${SFT:-$root/data/web_agent/sft/web_agent_sft.json}
RL_DIR=${RL_DIR:-$root/data/web_agent/rl}
VALIDATION=${VALIDATION:-256}
files=() settings=()
for word in "$@"; do
  if [[ -e $word || $word != *=* ]]; then files+=("\"$word\""); else settings+=("$word"); fi
done
printf -v tasks '%s,' "${files[@]}"
afm data queries "$root/configs/queries/web.yaml" "tasks=[$tasks]" "sft=[\"$SFT\"]" "model=$MODEL" "output_dir=$OUT" "${settings[@]}"
afm data prepare rl "$OUT/kept.jsonl" -o "$RL_DIR/train.parquet" --agent web --ability qa --validation "$VALIDATION" ${PROMPT:+--prompt "$PROMPT"}
