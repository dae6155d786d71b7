"""Attention over the paged KV cache, and the kernels that write into it."""
