#!/usr/bin/env bash
# Creates .venv with the locked CPU packages, and installs bubblewrap, numpy and sympy for the code sandbox.
# Usage: requirements/install-cpu.sh        (PYTHON=python3.11 VENV=.venv requirements/install-cpu.sh)
# PyPI's torch brings CUDA, several GB. The small build comes from PyTorch's own index, unless pip is configured with another index
# or PyTorch's does not answer. TORCH_INDEX=URL chooses another one.
# Prints each step and its progress (without a terminal, a line every PROGRESS_S=15 seconds), or nothing if all is installed.
# The full output is in VENV/install.log.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3.11}
VENV=${VENV:-.venv}
log=$VENV/install.log
number=0
watcher=

fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
end_watcher() { if [ -n "$watcher" ]; then kill "$watcher" && wait "$watcher" || true; fi; watcher=; } 2>/dev/null
trap end_watcher EXIT

# Shows seconds, packages of this step and of TOTAL (0: not counted), and what pip is doing. On a terminal it
# rewrites one line every second; elsewhere it prints a line every 15 seconds.
watch_step() { # TOTAL
  local begun=$SECONDS text there fetched now
  while sleep "$pause" >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
    read -r fetched now < <(awk '/^== /{n=0; now=""} /^(Collecting|Processing) /{n++} /^Installing collected /{now="unpacking"}
      /^ *(Collecting|Downloading|Building) /{now=$1 " " $2} END{print n+0, now}' "$log")
    text="$((SECONDS - begun)) s"
    if [ "$1" -gt 0 ]; then
      there=$(find "$VENV"/lib -maxdepth 4 -name '*.dist-info' 2>/dev/null | wc -l)   # a torch with CUDA brings more
      text+=", $fetched packages fetched, $((there < $1 ? there : $1)) of $1 installed"
    fi
    text+=${now:+, $now}
    if [ -t 1 ]; then printf '\r\033[K      %.70s' "$text"; else printf '      %.110s\n' "$text"; fi
  done
}

# Runs a command with its output in the log, and returns its status. If it fails, prints the end of the log.
step() { # TITLE TOTAL COMMAND...
  local title=$1 total=$2 begun=$SECONDS status=0
  shift 2
  number=$((number + 1))
  printf '[%d/%d] %s\n' "$number" "$steps" "$title"
  printf '\n== %s\n' "$title" >> "$log"
  watch_step "$total" 2>/dev/null & watcher=$!
  "$@" >> "$log" 2>&1 || status=$?
  end_watcher
  if [ -t 1 ]; then printf '\r\033[K'; fi
  if [ "$status" -eq 0 ]; then printf '      done in %d s\n' $((SECONDS - begun)); return 0; fi
  printf 'error: this step ended with status %d: %s\nThe last lines of %s:\n' "$status" "$title" "$log" >&2
  tail -n 20 "$log" >&2
  return "$status"
}

# Model-written code runs in bubblewrap with the system's Python, which all users can read.
missing=()
command -v bwrap >/dev/null || missing+=(bubblewrap)
[ -x /usr/bin/python3 ] || missing+=(python3)
lock=$(sha256sum requirements/cpu.txt pyproject.toml | sha256sum | cut -c1-16)
fresh=
[ "$(cat "$VENV/.lock" 2>/dev/null)" = "$lock" ] || fresh=1
steps=$(( (${#missing[@]} > 0 ? 1 : 0) + (fresh ? 5 : 0) ))
if [ -t 1 ]; then pause=1; else pause=${PROGRESS_S:-15}; fi

if [ -n "$fresh" ]; then
  got=$("$PYTHON" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3]); sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null) ||
    fail "$PYTHON: expected Python 3.11 or 3.12, got ${got:-a program that does not start}; install Python 3.11 with venv, and put PYTHON=python3.11 before the command"
  total=$(($(grep -c '^[A-Za-z0-9]' requirements/cpu.txt) + 4))   # torch, and what installs: pip, setuptools, wheel
  echo "Installing $total packages into $VENV: 3 GB of disk, 2 to 3 minutes if downloads are fast."
  echo "Log: $log"
fi
mkdir -p "$VENV" 2>/dev/null || fail "$VENV: no folder can be made there; choose another: VENV=DIR $0"

if [ ${#missing[@]} -gt 0 ]; then
  command -v apt-get >/dev/null || fail "${missing[*]} not found, and no apt-get; install it with your package manager"
  if [ "$(id -u)" -eq 0 ]; then as_root=(); else as_root=(sudo); sudo -v; fi
  from_apt() {
    "${as_root[@]}" apt-get update -qq &&
      "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}"
  }
  step "${missing[*]} for the sandbox, by apt-get" 0 from_apt || exit
fi

afm=$VENV/bin/afm
if [ -n "$fresh" ]; then
  pip=("$VENV/bin/python" -m pip --disable-pip-version-check install --progress-bar off)
  tools() { "$PYTHON" -m venv "$VENV" && "${pip[@]}" "setuptools==84.2.1" "wheel==0.48.0"; }
  step "an environment of ${PYTHON##*/}" 0 tools || exit
  small=https://download.pytorch.org/whl/cpu
  answers() { "$VENV/bin/python" -c "import urllib.request; urllib.request.urlopen('$small/torch/', timeout=5)" 2>/dev/null; }
  if [ -z "${TORCH_INDEX:-}" ] && ! "${pip[@]:0:3}" config list | grep -E 'index-url|find-links|no-index' > /dev/null && answers; then
    TORCH_INDEX=$small
  fi
  step "torch 2.13.0, the largest download" 0 "${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==2.13.0" || exit
  if compgen -G "$VENV/lib/python*/site-packages/nvidia_cu*.dist-info" >/dev/null; then
    echo "      note: torch was installed with CUDA, several GB; TORCH_INDEX=https://download.pytorch.org/whl/cpu selects the small build"
  fi
  step "the packages of requirements/cpu.txt" "$total" "${pip[@]}" --no-deps -r requirements/cpu.txt || exit
  step "this project" 0 "${pip[@]}" --no-deps --no-build-isolation -e . || exit
  echo "$lock" > "$VENV/.lock"
fi

# The packages that programs of agents import most. Trainings work without them, so a failure is only a warning.
packages=("$afm" sandbox install --missing numpy sympy)
if [ -n "$fresh" ]; then
  step "numpy and sympy for programs in the sandbox" 0 "${packages[@]}" || unsatisfied=1
else
  "${packages[@]}" || unsatisfied=1
fi
if [ -n "${unsatisfied:-}" ]; then
  echo "warning: programs in the sandbox cannot import numpy and sympy; try: $afm sandbox install numpy sympy" >&2
fi
