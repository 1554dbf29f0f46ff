#!/usr/bin/env bash
# Installs Redis for the tests of the servers' shared cache. Does not start it; the tests start their own.
# Usage: requirements/install-redis.sh
set -euo pipefail
if [ "$(id -u)" -eq 0 ]; then as_root=(); else as_root=(sudo); fi
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends redis-server >/dev/null
