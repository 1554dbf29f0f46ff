#!/usr/bin/env bash
# Mask-SFT of the code agent from Qwen2.5-Coder-32B-Instruct: 2 nodes x 8 GPUs of 80 GB (see the configuration's header).
# Usage, on each node: RANK=0 MASTER_ADDR=node0 train/code_agent/sft/sft_qwen2.5_32b.sh [--dry-run] [key=value ...]
# DATA_DIR, MODEL and OUTPUT_DIR must be on a shared file system. LORA=1 trains adapters only. Started again, it continues.
set -euo pipefail
cd "$(dirname "$0")/../../.."
command -v afm >/dev/null || PATH="$PWD/.venv/bin:$PATH"
export NNODES=${NNODES:-2} NODE_RANK=${RANK:?set it to the number of this node, 0 on the first}
export MASTER_ADDR=${MASTER_ADDR:?set it to the host name of node 0} MASTER_PORT=${MASTER_PORT:-29500}
MODEL=${MODEL:-Qwen/Qwen2.5-Coder-32B-Instruct}
DATA_DIR=${DATA_DIR:-data/code_agent/sft}
OUTPUT_DIR=${OUTPUT_DIR:-models/code_agent_32b_${LORA:+lora_}sft}
exec afm sft "configs/sft/code_agent_qwen2.5_32b${LORA:+_lora}.yaml" \
  "model_name_or_path=$MODEL" "dataset_dir=$DATA_DIR" "output_dir=$OUTPUT_DIR" "$@"
