#!/usr/bin/env bash
# DAPO of the web agent on GPUs. SIZE is 7b or 32b. Search and page servers: tool_servers/servers.sh; a judge: docs/judge.md.
# Usage: SIZE=7b MODEL=models/web_agent_7b_sft train/web_agent/rl/train_dapo_web_agent.sh [--dry-run] [key=value ...]
# More than one node: train/ray_cluster.sh, then add ray_address=HOST:PORT (docs/rl.md).
# A relative MODEL starts at the caller's folder, or else at the project's; other relative paths at the project's.
set -euo pipefail
cd "$(dirname "$0")/../../.."
# shellcheck source=/dev/null
. requirements/activate.sh .venv-rl .venv
SIZE=${SIZE:-7b}
MODEL=${MODEL:?set it to the folder of the SFT model, for example MODEL=models/web_agent_7b_sft}
[[ $MODEL == /* || $OLDPWD -ef . || ! -e $OLDPWD/$MODEL ]] || MODEL=$OLDPWD/$MODEL
exec afm rl "configs/rl/web_dapo_$SIZE.yaml" "model=$MODEL" "$@"
