"""Models by their architecture's name in config.json, and the loader of their weights."""
