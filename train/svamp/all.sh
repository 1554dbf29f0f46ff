#!/usr/bin/env bash
# SVAMP, the whole recipe (docs/recipes/svamp.md): download, prepare (with the teacher), SFT, RL, evaluation, report.
# If interrupted, run it again to continue. SIZE=135m runs on a CPU. SIZE=1.5b needs a GPU of 80 GB.
# Usage: [SIZE=135m|1.5b] [ROOT=runs/svamp_seed1] [FROM=download|prepare|sft|rl|eval|report] train/svamp/all.sh [--dry-run] [STAGE.key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=/dev/null
. requirements/activate.sh .venv
exec afm reproduce svamp "$@"
