#!/usr/bin/env bash
# Builds the documentation into site/ and checks its links. The pages load nothing from other servers.
# Usage: ./docs.sh [build|serve]        (serve shows the pages on http://127.0.0.1:8000 while you write)
set -euo pipefail
cd "$(dirname "$0")"
PYTHON=${PYTHON:-python3.11}
DOCS_VENV=${DOCS_VENV:-.venv-docs}
lock=$(sha256sum requirements/docs.txt | cut -c1-16)
if [ "$(cat "$DOCS_VENV/.lock" 2>/dev/null)" != "$lock" ]; then
  "$PYTHON" -m venv "$DOCS_VENV"
  "$DOCS_VENV/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps -r requirements/docs.txt
  echo "$lock" > "$DOCS_VENV/.lock"
fi
"${VENV:-.venv}/bin/python" benchmarks/reference_pages.py docs/reference
# CI works on a clean checkout: a table of keys that has changed now was committed out of date.
if [ "${CI:-}" = true ] && ! git diff --exit-code -- 'docs/*.md'; then
  echo "error: these tables of keys are out of date: run ./docs.sh and commit docs/" >&2
  exit 1
fi
if [ "${1:-build}" = serve ]; then exec "$DOCS_VENV/bin/mkdocs" serve; fi
NO_MKDOCS_2_WARNING=1 "$DOCS_VENV/bin/mkdocs" build --strict
if grep -rlE '<(link|script|img|iframe)[^>]+(href|src)="?(https?:)?//' site --include='*.html'; then
  echo "error: these pages load something from other servers" >&2
  exit 1
fi
