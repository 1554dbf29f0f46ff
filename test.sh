#!/usr/bin/env bash
# Makes the environment from nothing and runs the tests.
# Usage: ./test.sh [pytest arguments]      (./test.sh -m "not slow" for the quick ones)
set -euo pipefail
cd "$(dirname "$0")"
requirements/install-cpu.sh
exec "${VENV:-.venv}/bin/python" -m pytest "$@"
