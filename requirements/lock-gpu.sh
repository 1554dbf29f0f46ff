#!/usr/bin/env bash
# Resolves the GPU requirement files again from the .in files beside them (nothing is installed).
# Usage: requirements/lock-gpu.sh          needs uv on the PATH
set -euo pipefail
cd "$(dirname "$0")"
lock() {  # NAME [extra uv arguments]
  local name=$1; shift
  { echo "# Resolved from $name.in by requirements/lock-gpu.sh for Python 3.11, Linux x86-64, glibc >= 2.34."
    echo "# UNTESTED: resolves without conflict, never installed on a GPU by its authors."
    uv pip compile --quiet --no-header --no-annotate --python-version 3.11 --python-platform x86_64-manylinux_2_34 "$@" "$name.in"
  } > "$name.txt.new"
  mv "$name.txt.new" "$name.txt"
}
lock gpu-sft
lock gpu-rl-vllm
# sglang 0.5.12 pins transformers 5.6.0, which verl 0.9.1 excludes; verl's own choice is 5.9.0.
overrides=$(mktemp); trap 'rm -f "$overrides"' EXIT
echo "transformers==5.9.0" > "$overrides"
lock gpu-rl-sglang --override "$overrides"
