#!/usr/bin/env bash
# Makes the training files of the multi-hop QA agent from the folder of download.py, or of AFM's own download script:
# sft/mhqa_agent_sft.json with dataset_info.json, rl/train.parquet and rl/val.parquet. Finished files are kept.
# Usage: data/mhqa_agent/prepare.sh [--data data/mhqa_agent/raw] [--output-dir data/mhqa_agent] [--only SET] [--all] [--dry-run]
set -euo pipefail
root=$(realpath "$(dirname "$0")/../..")
# shellcheck source=/dev/null
. "$root/requirements/activate.sh" .venv .venv-rl .venv-sft
exec afm data prepare published "$root/configs/data/mhqa_agent.yaml" --data "$root/data/mhqa_agent/raw" --output-dir "$root/data/mhqa_agent" "$@"
