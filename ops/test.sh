#!/usr/bin/env bash
# Everything a change must pass: environment, lint, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. ops/environment.sh
make_environment dev

ruff check .
ruff format --check .
mypy
exec python -m pytest "$@"
