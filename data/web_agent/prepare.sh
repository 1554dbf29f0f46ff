#!/usr/bin/env bash
# Makes the training files of the web agent from the folder of download.py, or of AFM's own download script:
# sft/web_agent_sft.json with dataset_info.json, rl/train.parquet and rl/val.parquet. Finished files are kept.
# Usage: data/web_agent/prepare.sh [--data data/web_agent/raw] [--output-dir data/web_agent] [--only SET] [--all] [--dry-run]
set -euo pipefail
root=$(realpath "$(dirname "$0")/../..")
# shellcheck source=/dev/null
. "$root/requirements/activate.sh" .venv .venv-rl .venv-sft
exec afm data prepare published "$root/configs/data/web_agent.yaml" --data "$root/data/web_agent/raw" --output-dir "$root/data/web_agent" "$@"
