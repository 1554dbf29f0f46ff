#!/usr/bin/env bash
# Mask-SFT of the code agent from Qwen2.5-Coder-7B-Instruct: 1 node x 8 GPUs of 80 GB (see the configuration's header).
# Usage: DATA_DIR=data/code_agent/sft train/code_agent/sft/sft_qwen2.5_7b.sh [--dry-run] [key=value ...]
# More nodes: run it on each with NNODES, RANK, MASTER_ADDR and MASTER_PORT set. LORA=1 trains adapters only.
set -euo pipefail
cd "$(dirname "$0")/../../.."
command -v afm >/dev/null || PATH="$PWD/.venv/bin:$PATH"
export NNODES=${NNODES:-1} NODE_RANK=${RANK:-0} MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
MODEL=${MODEL:-Qwen/Qwen2.5-Coder-7B-Instruct}
DATA_DIR=${DATA_DIR:-data/code_agent/sft}
OUTPUT_DIR=${OUTPUT_DIR:-models/code_agent_7b_${LORA:+lora_}sft}
exec afm sft "configs/sft/code_agent_qwen2.5_7b${LORA:+_lora}.yaml" \
  "model_name_or_path=$MODEL" "dataset_dir=$DATA_DIR" "output_dir=$OUTPUT_DIR" "$@"
