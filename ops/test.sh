#!/usr/bin/env bash
# Everything a change must pass: environment, lint, types, documents, tests. With --all the long tests too (faults,
# RQ's own suite, every family on every backend, ...), which take an hour. Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. ops/environment.sh
make_environment dev

# The processes of pytest would each compile the libraries for themselves; mypy leaves a core for it. Some
# packages hold files that are no Python, of which nobody need hear.
python -m compileall -qq .venv/lib engine jobs worker sandbox tokenmill tests ops &
ruff check .
ruff format --check .
mypy
lint-imports --no-logo --no-cache
wait
# The site of docs/: a link or an anchor that leads nowhere is an error.
NO_MKDOCS_2_WARNING=1 mkdocs build --strict
# Many tests wait for processes that they have started: two processes more than there are cores keep these busy.
# One torch thread in each, more would wait for each other. tests/conftest.py says in which order files are taken.
export OMP_NUM_THREADS=1
processes=$(python -c 'import psutil; print(2 + psutil.cpu_count())')
if [ "${1:-}" = --all ]; then shift; else set -- -m "not long" "$@"; fi
python -m pytest -n "$processes" --dist loadfile --no-loadscope-reorder "$@"
echo "test.sh took $SECONDS s"
python -m ops.size "$SECONDS" || : # the bars
