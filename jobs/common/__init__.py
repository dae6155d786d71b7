"""What all packages of `jobs` use: Redis keys, RQ's jobs, how values are read and shown."""
