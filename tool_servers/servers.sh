#!/usr/bin/env bash
# Tool servers: in the background (all that are set up, or those named), or one of them in the foreground.
# Usage: tool_servers/servers.sh start|stop|status|test [NAME ...] [-- arguments for one server]
#        CODE_SERVER_TOKEN=... tool_servers/servers.sh code --host 0.0.0.0 --port 9002      (--dry-run shows the command)
# Keys and tokens come from the environment, never from the command line. Relative paths are those of the caller's folder.
set -euo pipefail
root=$(dirname "$(dirname "$(readlink -f "$0")")")
exec "${PYTHON:-$root/.venv/bin/python}" -P -m tool_servers "$@"
