#!/usr/bin/env bash
# Trains a tool-using agent on this computer's CPU and opens a report of what it learned.
# Usage: ./quickstart.sh [--world math|wiki] [--smoke] [--seed N] [--real-data FILE] [--output-dir DIR]   (./quickstart.sh --help)
set -euo pipefail
here=$(realpath "$(dirname "$0")")
VENV=$(realpath -m "${VENV:-$here/.venv}")
VENV=$VENV "$here/requirements/install-cpu.sh"
exec "$VENV/bin/afm" quickstart "$@"
