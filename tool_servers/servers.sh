#!/usr/bin/env bash
# Tool servers: in the background (all that are set up, or those named), or one of them in the foreground.
# Usage: tool_servers/servers.sh start|stop|status|test [NAME ...] [-- arguments for one server]
#        CODE_SERVER_TOKEN=... tool_servers/servers.sh code --host 0.0.0.0 --port 9002      (--dry-run shows the command)
# Keys and tokens come from the environment, never from the command line. Relative paths are those of the caller's folder.
set -euo pipefail
root=$(dirname "$(dirname "$(readlink -f "$0")")")
PYTHON=${PYTHON:-$root/.venv/bin/python}
known=$(for file in "$root"/tool_servers/*/__main__.py; do basename "$(dirname "$file")"; done | paste -sd ' ')
server=${1:-}
case "$server" in
  start | stop | status | test | -h | --help) exec "$PYTHON" -P -m tool_servers.shared.control "$@" ;;
esac
[ -f "$root/tool_servers/$server/__main__.py" ] || {
  echo "error: no server '$server', expected one of: $known; or start, stop, status, test" >&2
  exit 2
}
shift

command=("$PYTHON" -P -m "tool_servers.$server")
for argument in "$@"; do
  if [ "$argument" = --dry-run ]; then dry=1; else command+=("$argument"); fi
done
if [ -n "${dry:-}" ]; then printf '%q ' "${command[@]}"; echo; exit 0; fi
exec "${command[@]}"
