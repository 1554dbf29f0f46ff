#!/usr/bin/env bash
# Tool servers: in the background (all that are set up, or those named), or one of them in the foreground.
# Usage: tool_servers/servers.sh start|stop|status|test [NAME ...] [-- arguments for one server]
#        CODE_SERVER_TOKEN=... tool_servers/servers.sh code --host 0.0.0.0 --port 9002      (--dry-run shows the command)
# Keys and tokens come from the environment, never from the command line. Relative paths are those of the caller's folder.
set -euo pipefail
root=$(dirname "$(dirname "$(readlink -f "$0")")")
python=${PYTHON:-$root/.venv/bin/python}
if ! command -v "$python" >/dev/null; then
  echo "error: $python: not found; run requirements/install-cpu.sh, or set PYTHON to a Python that has the extra \`servers\` (docs/install.md)" >&2
  exit 1
fi
exec "$python" -P -m tool_servers "$@"
