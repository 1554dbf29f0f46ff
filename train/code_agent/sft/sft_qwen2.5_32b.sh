#!/usr/bin/env bash
# Mask-SFT of the code agent from Qwen2.5-Coder-32B-Instruct: 2 nodes x 8 GPUs of 80 GB (see the configuration's header).
# Usage, on each node: RANK=0 MASTER_ADDR=node0 train/code_agent/sft/sft_qwen2.5_32b.sh [--dry-run] [key=value ...]
# DATA_DIR, MODEL and OUTPUT_DIR must be on a shared file system. LORA=1 trains adapters only. If interrupted, run it again to resume.
# A relative MODEL starts at the caller's folder, or else at the project's; other relative paths at the caller's.
set -euo pipefail
root=$(realpath "$(dirname "$0")/../../..")
# shellcheck source=/dev/null
. "$root/requirements/activate.sh" .venv-sft .venv
if [[ -z ${RANK:-}${NODE_RANK:-}${MASTER_ADDR:-} ]]; then # as published: the first node, where this is
  export RANK=0 MASTER_ADDR=${HOSTNAME:-$(hostname)}
  echo "this is node 0; start the others with RANK=1 MASTER_ADDR=$MASTER_ADDR $0" >&2
fi
[[ -z ${RANK:-} ]] || export NODE_RANK=$RANK
case ${LORA:-0} in 0) lora= ;; 1) lora=_lora ;; *) echo "LORA=$LORA: expected 0 or 1" >&2; exit 2 ;; esac
export NNODES=${NNODES:-2}
MODEL=${MODEL:-Qwen/Qwen2.5-Coder-32B-Instruct}
[[ -e $MODEL || ! -e $root/$MODEL ]] || MODEL=$root/$MODEL
DATA_DIR=${DATA_DIR:-$root/data/code_agent/sft}
OUTPUT_DIR=${OUTPUT_DIR:-$root/models/code_agent_32b${lora}_sft}
exec afm sft "$root/configs/sft/code_agent_qwen2.5_32b$lora.yaml" \
  "model_name_or_path=$MODEL" "dataset_dir=$DATA_DIR" "output_dir=$OUTPUT_DIR" "$@"
