"""Kernels for x86 and other CPUs, compiled at start by Numba and run by torch's own threads.

Only `engine.attention.cpu_backend` imports them, and only when that backend is chosen: numba is an optional
dependency and takes a moment to import.
"""
