"""A sequence: its tokens, its progress, what it returns."""
