#!/usr/bin/env bash
# Makes the training files of the web agent from the folder of download.py, or of AFM's own download script:
# sft/web_agent_sft.json with dataset_info.json, rl/train.parquet and rl/val.parquet. Finished files are kept.
# Usage: data/web_agent/prepare.sh [--data data/web_agent/raw] [--output-dir data/web_agent] [--only SET] [--all] [--dry-run]
set -euo pipefail
root=$(realpath "$(dirname "$0")/../..")
command -v afm >/dev/null || PATH="$root/.venv/bin:$root/.venv-rl/bin:$root/.venv-sft/bin:$PATH"
exec afm data prepare published "$root/configs/data/web_agent.yaml" --data "$root/data/web_agent/raw" --output-dir "$root/data/web_agent" "$@"
