"""Triton's kernels, one file for each, and the transfer of arrays to the device. triton is optional."""
