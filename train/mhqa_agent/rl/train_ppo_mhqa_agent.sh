#!/usr/bin/env bash
# PPO of the multi-hop agent on GPUs. SIZE is 3b or 7b. A wiki server: docs/wiki.md, its address in WIKI_RAG_SERVER_URL.
# Usage: SIZE=7b MODEL=models/mhqa_agent_7b_sft train/mhqa_agent/rl/train_ppo_mhqa_agent.sh [--dry-run] [key=value ...]
# More than one node: train/ray_cluster.sh, then add ray_address=HOST:PORT (docs/rl.md).
# A relative MODEL starts at the caller's folder, or else at the project's; other relative paths at the project's.
set -euo pipefail
cd "$(dirname "$0")/../../.."
# shellcheck source=/dev/null
. requirements/activate.sh .venv-rl .venv
SIZE=${SIZE:-7b}
MODEL=${MODEL:?set it to the folder of the SFT model, for example MODEL=models/mhqa_agent_7b_sft}
[[ $MODEL == /* || $OLDPWD -ef . || ! -e $OLDPWD/$MODEL ]] || MODEL=$OLDPWD/$MODEL
exec afm rl "configs/rl/mhqa_ppo_$SIZE.yaml" "model=$MODEL" "$@"
