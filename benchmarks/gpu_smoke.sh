#!/usr/bin/env bash
# Tests a first GPU: runs SFT and RL, kills, resumes and compares on one GPU, then prints a table for docs/status.md.
# Usage: benchmarks/gpu_smoke.sh [--output-dir DIR] [--cpu] [--only STEP ...]
# Needs .venv-sft and .venv-rl (requirements/install-gpu.sh gpu-sft, gpu-rl-vllm); SFT_VENV and RL_VENV name other
# environments, and both may be the same. Each step takes at most 8 minutes. Finished steps are not repeated: run the same command again to
# continue. --cpu rehearses the steps without a GPU, in .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
case " $* " in *" --cpu "*) default=.venv ;; *) default= ;; esac
SFT_VENV=${SFT_VENV:-${default:-.venv-sft}}
RL_VENV=${RL_VENV:-${default:-.venv-rl}}
for venv in "$SFT_VENV" "$RL_VENV"; do
  [ -x "$venv/bin/python" ] || echo "note: $venv is missing, so its steps are skipped; requirements/install-gpu.sh creates it" >&2
done
python=$RL_VENV/bin/python
[ -x "$python" ] || python=$SFT_VENV/bin/python
[ -x "$python" ] || { echo "error: neither $SFT_VENV nor $RL_VENV exists" >&2; exit 1; }
exec "$python" benchmarks/gpu_smoke.py --sft-venv "$SFT_VENV" --rl-venv "$RL_VENV" "$@"
