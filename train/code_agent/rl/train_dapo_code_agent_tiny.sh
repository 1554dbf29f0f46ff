#!/usr/bin/env bash
# The CPU twin of train_dapo_code_agent.sh: a tiny model, word problems, the same code tool and the same path.
# Usage: MODEL=runs/tiny/sft train/code_agent/rl/train_dapo_code_agent_tiny.sh [--dry-run] [key=value ...]
set -euo pipefail
cd "$(dirname "$0")/../../.."
command -v afm >/dev/null || PATH="$PWD/.venv/bin:$PATH"
MODEL=${MODEL:?set it to the folder of the SFT model, for example MODEL=runs/tiny/sft}
exec afm rl configs/tiny/rl/math.yaml "model=$MODEL" "$@"
