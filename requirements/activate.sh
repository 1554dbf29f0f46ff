# shellcheck shell=bash
# Puts `afm` on the PATH unless it is there: that of the first environment in its arguments that has it. Scripts source it.
# Usage: . requirements/activate.sh .venv-rl .venv
if ! command -v afm >/dev/null; then
  checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
  for environment in "$@"; do
    [[ ! -x $checkout/$environment/bin/afm ]] || { PATH=$checkout/$environment/bin:$PATH && break; }
  done
  if ! command -v afm >/dev/null; then
    case $1 in .venv-sft) lock=gpu-sft ;; *) lock=gpu-rl-vllm ;; esac
    echo "error: afm is not installed: expected it on the PATH or in $checkout ($*); on a CPU run" \
      "requirements/install-cpu.sh, on a GPU machine requirements/install-gpu.sh $lock (docs/install.md)" >&2
    exit 1
  fi
fi
