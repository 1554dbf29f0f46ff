#!/usr/bin/env bash
# CPU version of train_dapo_code_agent.sh: a tiny model, the same code tool and code path. RECIPE is math (word problems:
# it learns) or code_dapo (all settings of the recipe except the sizes, on rows judged by programs or Math-Verify: a test that it runs).
# Usage: MODEL=runs/tiny/sft train/code_agent/rl/train_dapo_code_agent_tiny.sh [--dry-run] [key=value ...]
# A relative MODEL starts at the caller's folder, or else at the project's; other relative paths at the project's.
set -euo pipefail
cd "$(dirname "$0")/../../.."
# shellcheck source=/dev/null
. requirements/activate.sh .venv
MODEL=${MODEL:?set it to the folder of the SFT model, for example MODEL=runs/tiny/sft}
[[ $MODEL == /* || $OLDPWD -ef . || ! -e $OLDPWD/$MODEL ]] || MODEL=$OLDPWD/$MODEL
exec afm rl "configs/tiny/rl/${RECIPE:-math}.yaml" "model=$MODEL" "$@"
