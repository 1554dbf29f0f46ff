#!/usr/bin/env bash
# CPU version of train_dapo_web_agent.sh: a tiny model, short responses, the same search tools and code path.
# Searches need the servers of docs/web.md; questions: train_files=FILE.
# Usage: MODEL=runs/tiny/web_agent_sft train/web_agent/rl/train_dapo_web_agent_tiny.sh [--dry-run] [key=value ...]
# A relative MODEL starts at the caller's folder, or else at the project's; other relative paths at the project's.
set -euo pipefail
cd "$(dirname "$0")/../../.."
# shellcheck source=/dev/null
. requirements/activate.sh .venv
MODEL=${MODEL:?set it to the folder of the SFT model, for example MODEL=runs/tiny/web_agent_sft}
[[ $MODEL == /* || $OLDPWD -ef . || ! -e $OLDPWD/$MODEL ]] || MODEL=$OLDPWD/$MODEL
exec afm rl configs/tiny/rl/web_dapo.yaml "model=$MODEL" "$@"
