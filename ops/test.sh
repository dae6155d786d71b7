#!/usr/bin/env bash
# Everything a change must pass: environment, lint, types, documents, tests.
#   --quick   lint, types, and the tests that need neither torch nor another process: less than a minute
#   --all     the long tests too (faults, RQ's own suite, every family on every backend, ...), an hour, with coverage
# Other arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. ops/environment.sh
tier=default
case ${1:-} in
    --quick | --all)
        tier=${1#--}
        shift
        ;;
esac
make_environment dev

# One torch thread in each process of pytest, more would wait for each other.
export OMP_NUM_THREADS=1
num_cores=$(python -c 'import psutil; print(psutil.cpu_count())')

ruff check .
ruff format --check .
if [ "$tier" = quick ]; then
    mypy &
    types=$!
    python -m pytest -n "$num_cores" --quick -m "not long" "$@"
    wait "$types"
    echo "test.sh --quick took $SECONDS s"
    exit
fi

# The processes of pytest would each compile the libraries for themselves. Some packages hold files that are no Python, of
# which nobody need hear. What pytest makes of the tests is kept, too.
unset PYTHONDONTWRITEBYTECODE
python -m compileall -qq .venv/lib engine jobs worker sandbox tokenmill tests ops &
compiling=$!
# Many tests wait, and leave room for the types: they are checked beside the tests.
mypy &
types=$!
lint-imports --no-logo --no-cache
# The site of docs/: a link or an anchor that leads nowhere is an error.
NO_MKDOCS_2_WARNING=1 mkdocs build --strict
wait "$compiling" || :

# Many tests wait for processes that they have started: two processes more than there are cores keep these busy.
# tests/conftest.py says in which order files are taken.
pytest=(python -m pytest -n $((num_cores + 2)) --dist loadfile --no-loadscope-reorder)
if [ "$tier" = all ]; then
    "${pytest[@]}" --cov --cov-report=term "$@"
else
    "${pytest[@]}" -m "not long" "$@"
fi
wait "$types"
echo "test.sh took $SECONDS s"
python -m ops.size "$SECONDS" || : # the bars
