"""Model architectures, found by the name in config.json, and the loader of their weights."""
