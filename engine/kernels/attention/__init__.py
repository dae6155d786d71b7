"""Attention over the paged KV cache, and what writes into it."""
