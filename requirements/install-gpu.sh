#!/usr/bin/env bash
# Creates an environment from a GPU lock. Locks for RL contain flash-attn, which this script compiles with CUDA's nvcc.
# Usage: requirements/install-gpu.sh gpu-sft|gpu-rl-vllm|gpu-rl-sglang [VENV]      (default: .venv-sft or .venv-rl)
# PYTHON=python3.11 selects the interpreter. For flash-attn: CUDA_HOME, FLASH_ATTN_CUDA_ARCHS (80 for A100, 90 for H100 and
# H200, 100 for B200), MAX_JOBS; or FLASH_ATTN=FILE.whl installs a wheel. pip's variables work, such as PIP_FIND_LINKS.
set -euo pipefail
case "${1:-}" in
gpu-sft) default=.venv-sft ;;
gpu-rl-vllm | gpu-rl-sglang) default=.venv-rl ;;
-h | --help) sed -n '2,5s/^# //p' "$0"; exit 0 ;;
*) default= ;;
esac
if [ -z "$default" ] || [ $# -gt 2 ]; then
  echo "error: got '$*'; usage: requirements/install-gpu.sh gpu-sft|gpu-rl-vllm|gpu-rl-sglang [VENV]" >&2
  exit 2
fi
VENV=$(realpath -m "${2:-$(dirname "$0")/../$default}")
if [ -n "${FLASH_ATTN:-}" ]; then
  case $FLASH_ATTN in *.whl) ;; *) echo "error: FLASH_ATTN=$FLASH_ATTN: expected a wheel, flash_attn-*.whl" >&2; exit 1 ;; esac
  [ -f "$FLASH_ATTN" ] || { echo "error: FLASH_ATTN=$FLASH_ATTN: no such file; docs/install.md shows how to build the wheel" >&2; exit 1; }
  FLASH_ATTN=$(realpath "$FLASH_ATTN")
fi
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3.11}
lock=requirements/$1.txt
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda-13.0} MAX_JOBS=${MAX_JOBS:-8}
"$PYTHON" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' ||
  { echo "error: $PYTHON is not Python 3.11, which $lock needs; set PYTHON" >&2; exit 1; }
"$PYTHON" -c 'import ensurepip, venv' 2>/dev/null ||
  { echo "error: $PYTHON cannot create environments; install its venv (Debian, Ubuntu: apt-get install python3.11-venv), or set PYTHON" >&2; exit 1; }
builds=$(grep '^flash-attn==' "$lock" || true)
if [ -n "$builds" ] && [ -z "${FLASH_ATTN:-}" ] && [ ! -x "$CUDA_HOME/bin/nvcc" ]; then
  echo "error: $builds is compiled, and $CUDA_HOME/bin/nvcc is missing; set CUDA_HOME to the toolkit of CUDA 13, or FLASH_ATTN to a wheel" >&2
  exit 1
fi

"$PYTHON" -m venv "$VENV"
pip=("$VENV/bin/python" -m pip --disable-pip-version-check install)
"${pip[@]}" "wheel==0.48.0"
"${pip[@]}" --no-deps -r <(grep -v '^flash-attn==' "$lock")
if [ -n "$builds" ]; then
  "${pip[@]}" --no-deps --no-build-isolation "${FLASH_ATTN:-$builds}"
  # flash-attn overwrites flash_attn/cute of flash-attn-4, which is in SGLang's lock, with an older copy.
  if newer=$(grep '^flash-attn-4==' "$lock"); then "${pip[@]}" --no-deps --force-reinstall "$newer"; fi
fi
"${pip[@]}" --no-deps --no-build-isolation -e .
echo "installed $lock in $VENV; next: $VENV/bin/afm doctor"
