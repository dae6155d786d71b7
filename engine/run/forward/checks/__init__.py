"""The check of GPU kernels before a start."""
