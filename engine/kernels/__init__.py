"""Triton kernels, one file for each. They run on a GPU, or on a CPU under Triton's interpreter.

Only `engine.attention.triton_backend` imports them, and only when that backend is chosen: triton is an
optional dependency.
"""
