#!/usr/bin/env bash
# CPU version of train_ppo_mhqa_agent.sh: a tiny model, a generated encyclopaedia, the same search tool and code path.
# Needs a wiki server: WIKI_RAG_SERVER_URL.
# Usage: MODEL=runs/quickstart-wiki/sft train/mhqa_agent/rl/train_ppo_mhqa_agent_tiny.sh [--dry-run] [key=value ...]
# A relative MODEL starts at the caller's folder, or else at the project's; other relative paths at the project's.
set -euo pipefail
cd "$(dirname "$0")/../../.."
# shellcheck source=/dev/null
. requirements/activate.sh .venv
MODEL=${MODEL:?set it to the folder of the SFT model, for example MODEL=runs/quickstart-wiki/sft}
[[ $MODEL == /* || $OLDPWD -ef . || ! -e $OLDPWD/$MODEL ]] || MODEL=$OLDPWD/$MODEL
exec afm rl configs/tiny/rl/mhqa_ppo.yaml "model=$MODEL" "$@"
