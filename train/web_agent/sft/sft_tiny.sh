#!/usr/bin/env bash
# CPU version of sft_qwen2.5_*.sh: the same recipe with a tiny model and a few steps.
# Usage: MODEL=runs/tiny/start DATA_DIR=runs/tiny/data train/web_agent/sft/sft_tiny.sh [--dry-run] [key=value ...]
# A relative MODEL starts at the caller's folder, or else at the project's; other relative paths at the caller's.
set -euo pipefail
root=$(realpath "$(dirname "$0")/../../..")
# shellcheck source=/dev/null
. "$root/requirements/activate.sh" .venv
[[ -z ${RANK:-} ]] || export NODE_RANK=$RANK
case ${LORA:-0} in 0) lora= ;; 1) lora=_lora ;; *) echo "LORA=$LORA: expected 0 or 1" >&2; exit 2 ;; esac
MODEL=${MODEL:?set it to the folder of a fresh tiny model, for example MODEL=runs/quickstart/start}
[[ -e $MODEL || ! -e $root/$MODEL ]] || MODEL=$root/$MODEL
DATA_DIR=${DATA_DIR:?set it to a folder whose dataset_info.json registers web_agent_sft}
OUTPUT_DIR=${OUTPUT_DIR:-$root/runs/tiny/web_agent${lora}_sft}
exec afm sft "$root/configs/tiny/sft/web_agent$lora.yaml" \
  "model_name_or_path=$MODEL" "dataset_dir=$DATA_DIR" "output_dir=$OUTPUT_DIR" "$@"
