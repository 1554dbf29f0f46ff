#!/usr/bin/env bash
# Checks format, lint, types, shell scripts, English and documentation, as CI and pre-commit do. Usage: ./check.sh
set -euo pipefail
cd "$(dirname "$0")"
requirements/install-cpu.sh
bin=${VENV:-.venv}/bin
"$bin/ruff" format --check .
"$bin/ruff" check .
"$bin/mypy"
git ls-files -z '*.sh' .ci/run | xargs -0 "$bin/shellcheck"
"$bin/python" benchmarks/english.py
./docs.sh
