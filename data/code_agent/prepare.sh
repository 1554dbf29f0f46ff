#!/usr/bin/env bash
# Makes the training files of the code and math agent from what download.py fetched: code_agent_sft.json with its dataset_info.json, code_agent_rl.parquet.
# Usage: DATA_DIR=downloads/code_agent OUT_DIR=runs/data/code_agent data/code_agent/prepare.sh [--only SET] [--all] [--dry-run]
set -euo pipefail
root=$(realpath "$(dirname "$0")/../..")
command -v afm >/dev/null || PATH="$root/.venv/bin:$PATH"
DATA_DIR=${DATA_DIR:?set it to the folder of the download, for example DATA_DIR=downloads/code_agent}
OUT_DIR=${OUT_DIR:-$root/runs/data/code_agent}
exec afm data prepare published "$root/configs/data/code_agent.yaml" --data "$DATA_DIR" --out "$OUT_DIR" "$@"
