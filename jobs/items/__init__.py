"""Items: what is asked of one prompt, row or batch line, and the runner that drives many of them."""
