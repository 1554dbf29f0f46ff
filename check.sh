#!/usr/bin/env bash
# Format, lint, types, shell scripts, spelling and style of what a person reads; what CI and pre-commit run. Usage: ./check.sh
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
