#!/usr/bin/env bash
# Compiles the kernels for a Hopper GPU and runs their tests in the interpreter under another Triton than torch's own:
# that of a GPU machine that may be lent. Installs it into a folder of its own, which it removes; takes some minutes.
# usage: bash ops/other_triton.sh [VERSION]
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
# The interpreter of 3.6 turns arrays of one number into Python's, which numpy 2.4 refuses and earlier ones warn of.
"$python" -m pip install --quiet --no-deps --target "$folder" "triton==${1:-3.6.0}" "numpy<2.4"
export PYTHONPATH=$folder TRITON_CACHE_DIR=$folder/cache
"$python" -c 'import triton; print("Triton", triton.__version__)'
"$python" -m ops.bench.static --only "Qwen3-0.6B, bfloat16" "gpt-oss-20b"
# The line above compiles kernels; these tests run them. Tests in the sizes of models are for GPUs. On a CPU they run
# in smaller sizes.
export GPU_TESTS_ON_CPU=1
"$python" -m pytest -o filterwarnings=default tests/engine/test_kernels_at_model_size.py tests/engine/test_kernels_steps.py tests/engine/test_layer_kernels.py tests/engine/test_triton_backend.py tests/engine/test_captured_steps.py
