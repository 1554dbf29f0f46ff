#!/usr/bin/env bash
# Makes the environment from nothing and runs the tests.
# Usage: ./test.sh [pytest arguments]      (./test.sh -m "not slow" for the quick ones)
# Two processes share the tests; TEST_PROCESSES=0 runs them in one.
set -euo pipefail
cd "$(dirname "$0")"
requirements/install-cpu.sh
# The viewer's tests skip without a browser; in CI they have one.
if [ "${CI:-}" = true ] && ! command -v chromium >/dev/null; then requirements/install-chromium.sh; fi
# So do those of the sandbox backend that is no default.
if [ "${CI:-}" = true ] && [ "$(uname -m)" = x86_64 ] && ! command -v nsjail >/dev/null; then requirements/install-nsjail.sh; fi
# And those of the servers' cache in Redis.
if [ "${CI:-}" = true ] && command -v apt-get >/dev/null && ! command -v redis-server >/dev/null; then requirements/install-redis.sh; fi
# Trainings in two processes would fight over two cores with two threads each.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
exec "${VENV:-.venv}/bin/python" -m pytest -n "${TEST_PROCESSES:-2}" --dist loadfile --no-loadscope-reorder "$@"
