#!/usr/bin/env bash
# The CPU twin of sft_qwen2.5_*.sh: the same recipe, shrunk to a tiny model and a few steps.
# Usage: MODEL=runs/tiny/start DATA_DIR=runs/tiny/data train/mhqa_agent/sft/sft_tiny.sh [--dry-run] [key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../../.."
command -v afm >/dev/null || PATH="$PWD/.venv/bin:$PATH"
MODEL=${MODEL:?set it to the folder of a fresh tiny model, for example MODEL=runs/quickstart/start}
DATA_DIR=${DATA_DIR:?set it to the folder with dataset_info.json, for example DATA_DIR=runs/quickstart/data}
OUTPUT_DIR=${OUTPUT_DIR:-runs/tiny/mhqa_agent_sft}
exec afm sft "configs/tiny/sft/mhqa_agent${LORA:+_lora}.yaml" \
  "model_name_or_path=$MODEL" "dataset_dir=$DATA_DIR" "output_dir=$OUTPUT_DIR" "$@"
