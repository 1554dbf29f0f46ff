#!/usr/bin/env bash
# Makes .venv with the locked CPU set and installs what the code sandbox needs: bubblewrap, numpy and sympy.
# Usage: requirements/install-cpu.sh        (PYTHON=python3.11 VENV=.venv requirements/install-cpu.sh)
# Where the package index gives torch with CUDA, TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the small build.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3.11}
VENV=${VENV:-.venv}

# Model-written code runs in bubblewrap with the system's Python, which every user may read.
missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
[ -x /usr/bin/python3 ] || missing+=(python3)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" -eq 0 ]; then as_root=(); else as_root=(sudo); fi
  echo "installing ${missing[*]} for the sandbox"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
fi

command -v "$PYTHON" >/dev/null || { echo "error: $PYTHON not found; install Python 3.11 or set PYTHON=" >&2; exit 1; }
lock=$(sha256sum requirements/cpu.txt pyproject.toml | sha256sum | cut -c1-16)
if [ "$(cat "$VENV/.lock" 2>/dev/null)" != "$lock" ]; then
  "$PYTHON" -m venv "$VENV"
  pip=("$VENV/bin/python" -m pip --quiet --disable-pip-version-check install)
  "${pip[@]}" "setuptools==84.2.1" "wheel==0.48.0"
  "${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==2.13.0"
  "${pip[@]}" --no-deps -r requirements/cpu.txt
  "${pip[@]}" --no-deps --no-build-isolation -e .
  echo "$lock" > "$VENV/.lock"
fi

# What programs of agents import most. Trainings work without, so a machine that cannot have them is no error.
"$VENV/bin/afm" sandbox install --missing numpy sympy ||
  echo "warning: programs in the sandbox cannot import numpy and sympy; try: $VENV/bin/afm sandbox install numpy sympy" >&2
