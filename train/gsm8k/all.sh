#!/usr/bin/env bash
# GSM8K, the whole recipe (docs/recipes/gsm8k.md): download, prepare (with the teacher), SFT, RL, evaluation, report.
# If interrupted, run it again to continue. SIZE=135m runs on a CPU. SIZE=1.5b needs a GPU of 80 GB.
# Usage: [SIZE=135m|1.5b] [ROOT=runs/gsm8k_seed1] [FROM=download|prepare|sft|rl|eval|report] train/gsm8k/all.sh [--dry-run] [STAGE.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=/dev/null
. requirements/activate.sh .venv
exec afm reproduce gsm8k "$@"
