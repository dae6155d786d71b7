"""Triton kernels, one file for each. They run on a GPU, or on a CPU under Triton's interpreter.

Only `engine.attention.triton_backend` and `engine.kernels.layer_kernels` are imported from outside, and only
when the `triton` backend is chosen: triton is an optional dependency.
"""
