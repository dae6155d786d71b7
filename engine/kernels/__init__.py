"""What runs on the device itself: Triton's kernels, one file for each, and the transfer of arrays to it.

triton is an optional dependency: kernels are imported by engine.attention.triton_backend alone.
"""
