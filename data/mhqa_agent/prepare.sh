#!/usr/bin/env bash
# Makes the training files of the multi-hop QA agent from what download.py fetched: mhqa_agent_sft.json with its dataset_info.json, mhqa_agent_rl.parquet.
# Usage: DATA_DIR=downloads/mhqa_agent OUT_DIR=runs/data/mhqa_agent data/mhqa_agent/prepare.sh [--only SET] [--all] [--dry-run]
set -euo pipefail
root=$(realpath "$(dirname "$0")/../..")
command -v afm >/dev/null || PATH="$root/.venv/bin:$PATH"
DATA_DIR=${DATA_DIR:?set it to the folder of the download, for example DATA_DIR=downloads/mhqa_agent}
OUT_DIR=${OUT_DIR:-$root/runs/data/mhqa_agent}
exec afm data prepare published "$root/configs/data/mhqa_agent.yaml" --data "$DATA_DIR" --out "$OUT_DIR" "$@"
