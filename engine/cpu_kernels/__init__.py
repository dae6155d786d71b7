"""Kernels for CPUs, compiled at start by Numba, an optional dependency, and run by torch's own threads."""
