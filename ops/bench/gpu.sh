#!/usr/bin/env bash
# All that needs a GPU in one command, ended within 10 minutes (--budget): kernels are compiled first and apart, then
# the 256-sequence run (temperature 0.6, greedy, top_p), rows that are scored, what the device does in it by kernel,
# kernels, products and sampler against their floors, graphs against eager, overlap, the GPU tests, batch invariance,
# host time.
# usage: bash ops/bench/gpu.sh [--out FOLDER] [--only SECTION ...] [--budget SECONDS] [--dry-run]
# PYTHON names the interpreter; it needs torch, triton and the packages of `.[worker]` and `.[dev]`, nothing else.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec "${PYTHON:-python3}" -m ops.bench.gpu "$@"
