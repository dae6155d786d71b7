#!/usr/bin/env bash
# All that needs a GPU in one command, in under 8 minutes on an H200: kernels against their floors, the
# 256-sequence run with and without graphs and overlap, the GPU tests, batch invariance, host time.
# usage: bash ops/bench/gpu.sh [--out FOLDER] [--only SECTION ...] [--dry-run]
# PYTHON names the interpreter; it needs torch, triton and the packages of `.[worker]` and `.[dev]`, nothing else.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m ops.bench.gpu "$@"
