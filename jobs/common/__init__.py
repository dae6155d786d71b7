"""What every room uses and what needs none of them: Redis keys, RQ's jobs, how values are read and shown."""
