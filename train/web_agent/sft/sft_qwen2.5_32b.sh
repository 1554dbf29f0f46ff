#!/usr/bin/env bash
# Mask-SFT of the web agent from Qwen2.5-32B-Instruct: 1 node x 8 GPUs of 80 GB (see the configuration's header).
# Usage: DATA_DIR=data/web_agent/sft train/web_agent/sft/sft_qwen2.5_32b.sh [--dry-run] [key=value ...]
# More nodes: run it on each with NNODES, RANK, MASTER_ADDR (and MASTER_PORT) set. LORA=1 trains adapters only.
# A relative MODEL starts at the caller's folder, or else at the project's; other relative paths at the caller's.
set -euo pipefail
root=$(realpath "$(dirname "$0")/../../..")
# shellcheck source=/dev/null
. "$root/requirements/activate.sh" .venv-sft .venv
[[ -z ${RANK:-} ]] || export NODE_RANK=$RANK
case ${LORA:-0} in 0) lora= ;; 1) lora=_lora ;; *) echo "LORA=$LORA: expected 0 or 1" >&2; exit 2 ;; esac
MODEL=${MODEL:-Qwen/Qwen2.5-32B-Instruct}
[[ -e $MODEL || ! -e $root/$MODEL ]] || MODEL=$root/$MODEL
DATA_DIR=${DATA_DIR:-$root/data/web_agent/sft}
OUTPUT_DIR=${OUTPUT_DIR:-$root/models/web_agent_32b${lora}_sft}
exec afm sft "$root/configs/sft/web_agent_qwen2.5_32b$lora.yaml" \
  "model_name_or_path=$MODEL" "dataset_dir=$DATA_DIR" "output_dir=$OUTPUT_DIR" "$@"
