"""What runs on the device itself: Triton's kernels, one file for each, and the transfer of arrays to it.

The kernels run on a GPU, or on a CPU under Triton's interpreter. Only `engine.attention.triton_backend`
imports them, and only when that backend is chosen: triton is an optional dependency, which `upload` does
without.
"""
