#!/usr/bin/env bash
# Trains a tool-using agent on this computer's CPU and writes a report of what it learned.
# Usage: ./quickstart.sh [--world math|wiki] [--smoke] [--seed N] [--real-data FILE] [--output-dir DIR] [--open]
# The first call installs into .venv (2 to 3 minutes); training takes 7 to 9 minutes on 2 cores, --smoke about 3.
set -euo pipefail
here=$(realpath "$(dirname "$0")")
VENV=$(realpath -m "${VENV:-$here/.venv}")
case " $* " in *" --help "* | *" -h "*)
  if [ ! -x "$VENV/bin/afm" ]; then sed -n '2,4s/^# //p' "$0"; exit; fi
  exec "$VENV/bin/afm" quickstart --help ;;
esac
VENV=$VENV "$here/requirements/install-cpu.sh"
exec "$VENV/bin/afm" quickstart "$@"
