"""A run's folder: plan, parts, the output file, what is read back of them."""
