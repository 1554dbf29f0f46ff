#!/usr/bin/env bash
# Makes the training files of the code and math agent from the folder of download.py, or of AFM's own download script:
# sft/code_agent_sft.json with dataset_info.json, rl/train.parquet and rl/val.parquet. Finished files are kept.
# Usage: data/code_agent/prepare.sh [--data data/code_agent/raw] [--output-dir data/code_agent] [--only SET] [--all] [--dry-run]
set -euo pipefail
root=$(realpath "$(dirname "$0")/../..")
# shellcheck source=/dev/null
. "$root/requirements/activate.sh" .venv .venv-rl .venv-sft
exec afm data prepare published "$root/configs/data/code_agent.yaml" --data "$root/data/code_agent/raw" --output-dir "$root/data/code_agent" "$@"
