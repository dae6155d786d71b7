#!/usr/bin/env bash
# The whole product on one machine: prompts and a Parquet file through Redis, one worker, answers.
# MODEL=<folder or hub id> uses another model than the demo's own.
set -euo pipefail
cd "$(dirname "$0")/.."
. ops/environment.sh
make_environment demo
exec python -m ops.demo.run
