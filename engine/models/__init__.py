"""Model architectures, found by the name in config.json."""
