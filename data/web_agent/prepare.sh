#!/usr/bin/env bash
# Makes the training files of the web agent from what download.py fetched: web_agent_sft.json with its dataset_info.json, web_agent_rl.parquet.
# Usage: DATA_DIR=downloads/web_agent OUT_DIR=runs/data/web_agent data/web_agent/prepare.sh [--only SET] [--all] [--dry-run]
set -euo pipefail
root=$(realpath "$(dirname "$0")/../..")
command -v afm >/dev/null || PATH="$root/.venv/bin:$PATH"
DATA_DIR=${DATA_DIR:?set it to the folder of the download, for example DATA_DIR=downloads/web_agent}
OUT_DIR=${OUT_DIR:-$root/runs/data/web_agent}
exec afm data prepare published "$root/configs/data/web_agent.yaml" --data "$DATA_DIR" --out "$OUT_DIR" "$@"
