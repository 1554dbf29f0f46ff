#!/usr/bin/env bash
# Tests a first GPU: runs SFT and RL, kills, resumes and compares on one GPU, then prints a table for docs/status.md.
# Usage: benchmarks/gpu_smoke.sh [--output-dir DIR] [--cpu] [--only STEP ...]
# Needs .venv-sft and .venv-rl (requirements/install-gpu.sh gpu-sft, gpu-rl-vllm); SFT_VENV and RL_VENV name other
# environments, and both may be the same. Each step takes at most 8 minutes. Finished steps are not repeated: run the same command again to
# continue. --cpu rehearses the steps without a GPU, in .venv.
set -euo pipefail
cd "$(dirname "$0")/.."
case " $* " in
*" --cpu "*) default=.venv sft=requirements/install-cpu.sh rl=requirements/install-cpu.sh ;;
*) default='' sft="requirements/install-gpu.sh gpu-sft" rl="requirements/install-gpu.sh gpu-rl-vllm" ;;
esac
SFT_VENV=${SFT_VENV:-${default:-.venv-sft}}
RL_VENV=${RL_VENV:-${default:-.venv-rl}}
python=$RL_VENV/bin/python
[ -x "$python" ] || python=$SFT_VENV/bin/python
[ -x "$python" ] || { echo "error: $RL_VENV: no environment there; make it: $rl" >&2; exit 1; }
[ -x "$SFT_VENV/bin/python" ] || echo "note: $SFT_VENV is missing, so its steps are skipped; make it: $sft" >&2
[ -x "$RL_VENV/bin/python" ] || echo "note: $RL_VENV is missing, so its steps are skipped; make it: $rl" >&2
exec "$python" benchmarks/gpu_smoke.py --sft-venv "$SFT_VENV" --rl-venv "$RL_VENV" "$@"
