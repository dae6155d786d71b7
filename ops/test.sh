#!/usr/bin/env bash
# Everything a change must pass: environment, lint, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. ops/environment.sh
make_environment dev

ruff check .
ruff format --check .
mypy
lint-imports --no-logo --no-cache
# One process for each core, one torch thread in each: more would wait for each other.
export OMP_NUM_THREADS=1
exec python -m pytest -n logical --dist loadfile "$@"
