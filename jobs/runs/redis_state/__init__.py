"""A run's keys in Redis."""
