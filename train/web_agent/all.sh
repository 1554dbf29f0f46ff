#!/usr/bin/env bash
# From AFM's published data to a report: download, prepare, SFT, RL, evaluation, report (docs/reproduce.md).
# If interrupted, run it again to continue.
# Usage: SIZE=7b|32b [FROM=download|prepare|sft|rl|eval|report] train/web_agent/all.sh [--dry-run] [STAGE.key=value ...]
# On a CPU in minutes, with generated rows in the published layouts: TINY=1 train/web_agent/all.sh
set -euo pipefail
cd "$(dirname "$0")/../.."
# shellcheck source=/dev/null
. requirements/activate.sh .venv .venv-rl .venv-sft
exec afm reproduce web_agent "$@"
