#!/usr/bin/env bash
# Starts a tool server in the foreground; the token comes from the environment, never from the command line.
# Usage: CODE_SERVER_TOKEN=... tool_servers/servers.sh code --host 0.0.0.0 --port 9002
#        (PYTHON=.venv/bin/python tool_servers/servers.sh code --dry-run)
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
known=$(for file in tool_servers/*/__main__.py; do basename "$(dirname "$file")"; done | paste -sd ' ')
server=${1:-}
[ -f "tool_servers/$server/__main__.py" ] || { echo "error: no server '$server', expected one of: $known" >&2; exit 2; }
shift

command=("$PYTHON" -m "tool_servers.$server")
for argument in "$@"; do
  if [ "$argument" = --dry-run ]; then dry=1; else command+=("$argument"); fi
done
if [ -n "${dry:-}" ]; then printf '%q ' "${command[@]}"; echo; exit 0; fi
exec "${command[@]}"
