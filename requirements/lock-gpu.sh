#!/usr/bin/env bash
# Resolves the GPU requirement files again from their .in files. Installs nothing; prove_locks.py does.
# Usage: requirements/lock-gpu.sh          needs uv on the PATH
set -euo pipefail
cd "$(dirname "$0")"
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
# flash-attn is only available as a source package, whose metadata cannot be built without torch. This repeats its PKG-INFO.
cat > "$work/uv.toml" <<'TOML'
[[dependency-metadata]]
name = "flash-attn"
version = "2.8.3"
requires-dist = ["torch", "einops"]
TOML
lock() {  # NAME [extra uv arguments]
  local name=$1; shift
  { echo "# Resolved from $name.in by requirements/lock-gpu.sh for Python 3.11, Linux x86-64, glibc >= 2.34."
    echo "# Installed and imported without a GPU by requirements/prove_locks.py; never run on a GPU by its authors."
    case $name in gpu-rl-*)
      echo "# flash-attn is a source package: install everything else first, then build it with nvcc of CUDA 13"
      echo "# (requirements/install-gpu.sh does). pip install -r with this file alone fails."
    esac
    uv pip compile --quiet --config-file "$work/uv.toml" --no-header --no-annotate --python-version 3.11 \
      --python-platform x86_64-manylinux_2_34 "$@" "$name.in"
  } > "$work/$name.txt"
  mv "$work/$name.txt" "$name.txt"
}
lock gpu-sft
lock gpu-rl-vllm
# sglang 0.5.12 pins transformers 5.6.0, which verl 0.9.1 excludes; verl's own choice is 5.9.0.
echo "transformers==5.9.0" > "$work/overrides"
lock gpu-rl-sglang --override "$work/overrides"
