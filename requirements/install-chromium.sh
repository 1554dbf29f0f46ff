#!/usr/bin/env bash
# Installs Debian's Chromium, in which the tests and the benchmark of `afm view` open its page.
# Usage: requirements/install-chromium.sh
set -euo pipefail
if [ "$(id -u)" -eq 0 ]; then as_root=(); else as_root=(sudo); fi
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null
